"""The definition in plain jax.numpy: tiles of the table, with an online softmax in float32."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Real

from .._compat import Target
from ..attention.scales import BlockScales, scales_refusals

KEYS_PER_TILE = 512


class _Softmax(NamedTuple):
    """Running state of an online softmax: largest score, sum of weights, weighted values."""

    largest: Float[Array, "B K G T"]
    total: Float[Array, "B K G T"]
    mixed: Float[Array, "B K G T H"]


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
) -> Float[Array, "B T N H"]:
    """See `api.block_attention`.

    Memory is bounded by one tile, and time follows the longest sequence, not the width of the
    table.
    """
    batch, length, query_heads, width = q.shape
    _, kv_heads, block_size, _ = key_blocks.shape
    group = query_heads // kv_heads
    grouped = q.reshape(batch, length, kv_heads, group, width)
    blocks_per_tile = max(1, min(KEYS_PER_TILE // block_size, block_table.shape[1]))
    padding = -block_table.shape[1] % blocks_per_tile
    table = jnp.pad(jnp.clip(block_table, 0, key_blocks.shape[0] - 1), ((0, 0), (0, padding)))

    def tile(index: Int[Array, ""], carry: _Softmax) -> _Softmax:
        first = index * blocks_per_tile
        blocks = jax.lax.dynamic_slice_in_dim(table, first, blocks_per_tile, axis=1)
        key_at = first * block_size + jnp.arange(blocks_per_tile * block_size, dtype=jnp.int32)
        visible = key_at[None, None, :] <= positions[:, :, None]
        if window is not None:
            inside = key_at[None, None, :] > positions[:, :, None] - window
            visible &= inside | (key_at < sinks)[None, None, :]
        scores = _scores(grouped, key_blocks, blocks, scales)
        values = _gather(value_blocks, blocks)
        seen = jnp.any(visible, axis=1)[:, None]
        values = jnp.where(seen[..., None], values, 0).astype(q.dtype)
        factor = None
        if scales is not None:
            factor = jnp.where(seen, _gather(scales.value_scale, blocks), 0)
        return _fold(carry, scores, values, visible, factor)

    start = _Softmax(
        jnp.full((batch, kv_heads, group, length), -jnp.inf, jnp.float32),
        jnp.zeros((batch, kv_heads, group, length), jnp.float32),
        jnp.zeros((batch, kv_heads, group, length, width), jnp.float32),
    )
    if table.shape[1] == blocks_per_tile:
        end = tile(jnp.int32(0), start)
    else:
        tiles = jnp.max(positions) // (blocks_per_tile * block_size) + 1
        tiles = jnp.minimum(tiles, table.shape[1] // blocks_per_tile)
        end = jax.lax.fori_loop(0, tiles, tile, start)
    mixed = end.mixed / jnp.where(end.total > 0, end.total, 1.0)[..., None]
    return mixed.transpose(0, 3, 1, 2, 4).reshape(q.shape).astype(q.dtype)


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
    """What gives a call no meaning; see `dispatch.Implementation`."""
    reasons = []
    query_heads, kv_heads = q.shape[2], key_blocks.shape[1]
    if query_heads % kv_heads:
        reasons.append(f"{query_heads} query heads cannot share {kv_heads} key/value heads evenly")
    if window is not None and not (isinstance(window, int) and 1 <= window < 2**31):
        reasons.append(f"window is {window}; accepted is a whole number from 1 on, or None")
    if not isinstance(sinks, int) or not 0 <= sinks < 2**31 or (sinks and window is None):
        reasons.append(f"sinks is {sinks}; accepted is 0, or a larger number beside a window")
    return reasons + scales_refusals(q, key_blocks, value_blocks, scales)


def _scores(
    q: Float[Array, "B T K G H"],
    key_blocks: Real[Array, "P K Z H"],
    blocks: Int[Array, "B c"],
    scales: BlockScales | None,
) -> Float[Array, "B K G T S"]:
    """Products of the queries with the keys of these blocks, float32."""

    def product(keys: Float[Array, "B K S H"]) -> Float[Array, "B K G T S"]:
        return jnp.einsum("btkgh,bksh->bkgts", q, keys, preferred_element_type=jnp.float32)

    keys = _gather(key_blocks, blocks)
    if scales is None:
        return product(keys)
    # Codes are exact in q's dtype; the sum of base and scaled code would not be.
    scale = _gather(scales.key_scale, blocks)[:, :, None, None]
    from_base = product(jnp.swapaxes(scales.key_base[blocks], 1, 2))
    from_base = jnp.repeat(from_base, key_blocks.shape[2], axis=-1)
    return product(keys.astype(q.dtype)) * scale + from_base


def _gather(pool: Real[Array, "P K Z *h"], blocks: Int[Array, "B c"]) -> Real[Array, "B K S *h"]:
    """The chosen blocks of the pool, joined along the tokens."""
    batch, count = blocks.shape
    _, kv_heads, block_size, *width = pool.shape
    chosen = jnp.swapaxes(pool[blocks], 1, 2)
    return chosen.reshape(batch, kv_heads, count * block_size, *width)


def _fold(
    carry: _Softmax,
    scores: Float[Array, "B K G T S"],
    values: Float[Array, "B K S H"],
    visible: Array,
    factor: Float[Array, "B K S"] | None,
) -> _Softmax:
    """Add one tile of keys to the running softmax.

    A tile that a query cannot see leaves its row as it was.
    """
    mask = visible[:, None, None]
    scores = jnp.where(mask, scores * jnp.float32(values.shape[-1] ** -0.5), -jnp.inf)
    largest = jnp.maximum(carry.largest, jnp.max(scores, axis=-1))
    safe = jnp.where(jnp.isfinite(largest), largest, 0.0)
    weights = jnp.where(mask, jnp.exp(scores - safe[..., None]), 0.0)
    decay = jnp.where(jnp.isfinite(carry.largest), jnp.exp(carry.largest - safe), 0.0)
    total = carry.total * decay + jnp.sum(weights, axis=-1)
    if factor is not None:
        weights = weights * factor[:, :, None, None]
    mixed = jnp.einsum(
        "bkgts,bksh->bkgth",
        weights.astype(values.dtype),
        values,
        preferred_element_type=jnp.float32,
    )
    return _Softmax(largest, total, carry.mixed * decay[..., None] + mixed)
