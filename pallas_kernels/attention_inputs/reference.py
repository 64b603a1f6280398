"""What goes into attention, in plain jax.numpy."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Real

from .._compat import Target
from ..attention.scales import BlockScales, quantise, scales_refusals


class AttentionInputs(NamedTuple):
    """What attention reads.

    Attributes:
        q: rotated queries [B, T, N, H].
        key: the pool [P, K, Z, H], or rotated keys [B, T, K, H] without a cache.
        value: the pool, or values.
        scales: of int8 pools, else None.
    """

    q: Any
    key: Any
    value: Any
    scales: BlockScales | None


def attention_inputs(
    q: Float[Array, "B T N G"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    cos: Float[Array, "B T R2"],
    sin: Float[Array, "B T R2"],
    q_weight: Float[Array, " H"] | None = None,
    k_weight: Float[Array, " H"] | None = None,
    key_blocks: Real[Array, "P K Z H"] | None = None,
    value_blocks: Real[Array, "P K Z H"] | None = None,
    block_table: Int[Array, "B W"] | None = None,
    positions: Int[Array, "B T"] | None = None,
    scales: BlockScales | None = None,
    *,
    eps: float,
    zero_centred: bool,
) -> AttentionInputs:
    """See `api.attention_inputs`."""

    def prepared(x: Float[Array, "B T n H"], weight: Array | None) -> Float[Array, "B T n H"]:
        wide = x.astype(jnp.float32)
        if weight is not None:
            wide = _norm(wide, weight, eps, zero_centred)
        return _rotate(wide, cos, sin).astype(x.dtype)

    q, k = prepared(q[..., : k.shape[-1]], q_weight), prepared(k, k_weight)
    if key_blocks is None or value_blocks is None or block_table is None or positions is None:
        return AttentionInputs(q, k, v, None)
    block, row = _places(block_table, positions, *key_blocks.shape[::2])
    if scales is None:
        k, v = k.astype(key_blocks.dtype), v.astype(value_blocks.dtype)
    else:
        k, v, scales = _coded(scales, block, row, k, v)
    return AttentionInputs(
        q, _written(key_blocks, block, row, k), _written(value_blocks, block, row, v), scales
    )


def refusals(
    target: Target,
    q: Any,
    k: Any,
    v: Any,
    cos: Any,
    sin: Any,
    q_weight: Any = None,
    k_weight: Any = None,
    key_blocks: Any = None,
    value_blocks: Any = None,
    block_table: Any = None,
    positions: Any = None,
    scales: Any = None,
    **settings: Any,
) -> list[str]:
    """What gives a call no meaning; see `dispatch.Implementation`."""
    reasons, width = [], k.shape[-1]
    if q.shape[-1] not in (width, 2 * width):
        reasons.append(
            f"query heads are {q.shape[-1]} wide; accepted is the keys' {width}, or twice that "
            "with output gates"
        )
    if not 0 < 2 * cos.shape[-1] <= width:
        reasons.append(
            f"{2 * cos.shape[-1]} dimensions are to be turned; accepted is up to the head's {width}"
        )
    cache = (key_blocks, value_blocks, block_table, positions)
    if any(part is None for part in cache) != all(part is None for part in (*cache, scales)):
        reasons.append(
            "a cache has key_blocks, value_blocks, block_table and positions; give all or none"
        )
    elif key_blocks is not None:
        reasons += scales_refusals(k, key_blocks, value_blocks, scales)
    return reasons


def _norm(
    x: Float[Array, "B T n H"], weight: Float[Array, " H"], eps: float, zero_centred: bool
) -> Float[Array, "B T n H"]:
    """Root-mean-square norm of each head."""
    scale = weight.astype(jnp.float32)
    scale = 1.0 + scale if zero_centred else scale
    normal = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return normal * jnp.broadcast_to(scale, x.shape)


def _rotate(
    x: Float[Array, "B T n H"], cos: Float[Array, "B T R2"], sin: Float[Array, "B T R2"]
) -> Float[Array, "B T n H"]:
    """Turns the first R dimensions, pairing i with i + R / 2; the others pass through."""
    half = cos.shape[-1]
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    first, second = jnp.split(x[..., : 2 * half], 2, axis=-1)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate([*turned, x[..., 2 * half :]], axis=-1)


def _places(
    table: Int[Array, "B W"], positions: Int[Array, "B T"], blocks: int, block_size: int
) -> tuple[Int[Array, "B T"], Int[Array, "B T"]]:
    """Block of each token, and its row in it; tokens that are not written have block P."""
    real = positions >= 0
    entry = jnp.where(real, positions // block_size, 0)
    block = jnp.take_along_axis(table, entry, axis=1, mode="fill", fill_value=-1)
    written = real & (block >= 0) & (block < blocks)
    return jnp.where(written, block, blocks), jnp.where(written, positions % block_size, 0)


def _written(pool: Array, block: Int[Array, "B T"], row: Int[Array, "B T"], new: Array) -> Array:
    return pool.at[block, :, row].set(new, mode="drop")


def _coded(
    scales: BlockScales,
    block: Int[Array, "B T"],
    row: Int[Array, "B T"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
) -> tuple[Array, Array, BlockScales]:
    """Codes of keys and values, and the scales with theirs in place.

    First tokens come before the others, which are coded against them.
    """
    first = jnp.where(row == 0, block, scales.key_base.shape[0])
    bases = scales.key_base.at[first].set(k.astype(scales.key_base.dtype), mode="drop")
    base = bases.at[block].get(mode="fill", fill_value=0)
    key, key_scale = quantise(k.astype(jnp.float32) - base.astype(jnp.float32))
    value, value_scale = quantise(v.astype(jnp.float32))
    key_scale = _written(scales.key_scale, block, row, key_scale)
    value_scale = _written(scales.value_scale, block, row, value_scale)
    return key, value, BlockScales(key_scale, value_scale, bases)
