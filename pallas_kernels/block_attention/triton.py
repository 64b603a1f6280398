"""The Triton implementation: what it takes, and the call of its kernels."""

from __future__ import annotations

from typing import Any

from jaxtyping import Array, Float, Int, Real

from .._compat import Target, current_target, triton_refusals
from ..attention.heads import head_refusals, listed
from ..attention.rows import flat_rows
from ..attention.scales import BlockScales, pool_refusals
from . import reference
from .config import Config, config_for, shared_bytes
from .decode import Parts, attend_splits, combine
from .prefill import prefill
from .shape import Shape

BLOCK_SIZES = (16, 32, 64, 128)
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
    blocks, kv_heads, block_size, width = key_blocks.shape
    if scales is None:
        dtypes = (q.dtype, key_blocks.dtype, value_blocks.dtype)
        reasons += head_refusals(width, "queries, keys and values", dtypes)
    else:
        reasons += head_refusals(width, "queries", (q.dtype,))
    if block_size not in BLOCK_SIZES:
        reasons.append(f"block size {block_size} is not one of {listed(BLOCK_SIZES)}")
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
    """See `api.block_attention`; `config` is that of decoding, found if None."""
    if config is None:
        config = decode_config(current_target(), q, key_blocks, block_table)
    if config is None:
        arrays = (q, key_blocks, value_blocks, block_table, positions, scales)
        return prefill(*arrays, window=window, sinks=sinks)
    shape = Shape.of(q, key_blocks, block_table, window=window, sinks=sinks)
    keys, values = flat_rows(key_blocks), flat_rows(value_blocks)
    mixed = attend_splits(shape, config, flat_rows(q), keys, values, block_table, positions, scales)
    if isinstance(mixed, Parts):
        mixed = combine(shape, config, q.dtype, mixed, positions)
    return mixed.reshape(q.shape)


def decode_config(target: Target, q: Any, key_blocks: Any, block_table: Any) -> Config | None:
    """How to decode; None for more queries than that is for, or than fit into the device."""
    if q.shape[1] * q.shape[2] > MOST_DECODED * key_blocks.shape[1]:
        return None
    config = config_for(target, q, key_blocks, block_table)
    # Many rows of float32, on smaller GPUs. The other kernel works with as few as fit.
    return config if shared_bytes(config, q, key_blocks) <= target.shared_memory else None
