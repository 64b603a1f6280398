"""The Triton implementation: what it takes, and the call of its kernels."""

from __future__ import annotations

from typing import Any

from jaxtyping import Array, Float, Int, Real

from .._compat import Target, current_target, triton_refusals
from . import reference
from .config import Config, heuristic, shared_bytes
from .decode import Parts, attend, combine
from .prefill import prefill
from .scales import BlockScales, pool_refusals
from .shape import Shape
from .specs import BLOCK_SIZES, DTYPES, HEAD_WIDTHS

# More queries a key/value head are cut into tiles, which has its own kernel.
MOST_DECODED = 64


def refusals(
    target: Target,
    q: Any,
    key_blocks: Any,
    value_blocks: Any,
    block_table: Any,
    positions: Any,
    scales: Any = None,
    *,
    window: int | None,
    sinks: int,
) -> list[str]:
    """Why the kernel does not take a call; see `dispatch.Implementation`."""
    reasons = triton_refusals(target)
    reasons += reference.refusals(
        target,
        q,
        key_blocks,
        value_blocks,
        block_table,
        positions,
        scales,
        window=window,
        sinks=sinks,
    )
    width = q.shape[3]
    blocks, kv_heads, block_size, _ = key_blocks.shape
    if width not in HEAD_WIDTHS:
        reasons.append(f"head dim {width} is not one of {_listed(HEAD_WIDTHS)}")
    if block_size not in BLOCK_SIZES:
        reasons.append(f"block size {block_size} is not one of {_listed(BLOCK_SIZES)}")
    dtypes = {str(x.dtype) for x in (q, key_blocks, value_blocks)}
    if scales is not None:
        dtypes = {str(q.dtype)}
    if len(dtypes) > 1 or not dtypes <= set(DTYPES):
        reasons.append(
            f"dtypes of queries, keys and values ({q.dtype}, {key_blocks.dtype}, "
            f"{value_blocks.dtype}) are not all the same one of {_listed(DTYPES)}, nor such "
            "queries and int8 keys and values with scales"
        )
    if blocks * kv_heads * block_size >= 2**31:
        reasons.append(f"the pool has {blocks * kv_heads * block_size} rows, 2^31 or more")
    reasons += pool_refusals(key_blocks)
    return reasons


def block_attention(
    q: Float[Array, "B T N H"],
    key_blocks: Real[Array, "P K Z H"],
    value_blocks: Real[Array, "P K Z H"],
    block_table: Int[Array, "B W"],
    positions: Int[Array, "B T"],
    scales: BlockScales | None = None,
    *,
    window: int | None,
    sinks: int,
    config: Config | None = None,
) -> Float[Array, "B T N H"]:
    """See `api.block_attention`; `config` is that of decoding, the heuristic's if None."""
    if config is None:
        config = decode_config(current_target(), q, key_blocks, block_table)
    if config is None:
        arrays = (q, key_blocks, value_blocks, block_table, positions, scales)
        return prefill(*arrays, window=window, sinks=sinks)
    batch, length, query_heads, width = q.shape
    blocks, kv_heads, block_size, _ = key_blocks.shape
    shape = Shape(
        batch=batch,
        length=length,
        kv_heads=kv_heads,
        group=query_heads // kv_heads,
        width=width,
        blocks=blocks,
        block_size=block_size,
        columns=block_table.shape[1],
        window=window,
        sinks=sinks,
        coded=scales is not None,
        config=config,
    )
    mixed = attend(
        shape,
        q.reshape(-1, width),
        key_blocks.reshape(-1, width),
        value_blocks.reshape(-1, width),
        block_table,
        positions,
        scales,
    )
    if isinstance(mixed, Parts):
        mixed = combine(shape, q.dtype, mixed, positions)
    return mixed.reshape(q.shape)


def decode_config(target: Target, q: Any, key_blocks: Any, block_table: Any) -> Config | None:
    """How to decode; None for more queries than that is for, or than fit into the device."""
    if q.shape[1] * q.shape[2] > MOST_DECODED * key_blocks.shape[1]:
        return None
    config = heuristic(target, q, key_blocks, block_table)
    # Many rows of float32, on smaller GPUs. The other kernel works with as few as fit.
    return config if shared_bytes(config, q, key_blocks) <= target.shared_memory else None


def _listed(values: tuple[Any, ...]) -> str:
    return ", ".join(map(str, values))
