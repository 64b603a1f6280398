"""Causal attention of new tokens over a block cache that already holds their keys and values."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

KEYS_PER_TILE = 512


class _Softmax(NamedTuple):
    """Running state of an online softmax: largest score, sum of weights, weighted values."""

    largest: Float[Array, "B K G T"]
    total: Float[Array, "B K G T"]
    mixed: Float[Array, "B K G T H"]


def block_attention(
    q: Float[Array, "B T N H"],
    key_blocks: Float[Array, "P K Z H"],
    value_blocks: Float[Array, "P K Z H"],
    block_table: Int[Array, "B W"],
    positions: Int[Array, "B T"],
    *,
    window: int | None = None,
) -> Float[Array, "B T N H"]:
    """Attention of each query over the cached tokens at its position and before.

    Works through the table in tiles with an online softmax in float32, so memory is bounded by one
    tile and time follows the longest sequence, not the width of the table. Unused cache rows may
    hold anything, NaN included.

    Args:
        q: queries, already rotated; scaled by H^-0.5 here.
        key_blocks: pool of keys; block p of a head is one [Z, H] tile.
        value_blocks: pool of values.
        block_table: block_table[b, i] holds the tokens i * Z to (i + 1) * Z - 1 of sequence b.
        positions: position of each query in its sequence; negative for padding, whose result is
            zero.
        window: if given, a query sees its own position and the window - 1 before it.

    Returns:
        The attended values in q's dtype.
    """
    batch, length, query_heads, width = q.shape
    _, kv_heads, block_size, _ = key_blocks.shape
    group = query_heads // kv_heads
    grouped = q.reshape(batch, length, kv_heads, group, width)
    blocks_per_tile = max(1, min(KEYS_PER_TILE // block_size, block_table.shape[1]))
    padding = -block_table.shape[1] % blocks_per_tile
    table = jnp.pad(block_table, ((0, 0), (0, padding)))

    def tile(index: Int[Array, ""], carry: _Softmax) -> _Softmax:
        first = index * blocks_per_tile
        blocks = jax.lax.dynamic_slice_in_dim(table, first, blocks_per_tile, axis=1)
        key_at = first * block_size + jnp.arange(blocks_per_tile * block_size, dtype=jnp.int32)
        visible = key_at[None, None, :] <= positions[:, :, None]
        if window is not None:
            visible &= key_at[None, None, :] > positions[:, :, None] - window
        keys = _gather(key_blocks, blocks)
        values = _gather(value_blocks, blocks)
        values = jnp.where(jnp.any(visible, axis=1)[:, None, :, None], values, 0)
        return _fold(carry, grouped, keys, values, visible)

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


def _gather(pool: Float[Array, "P K Z H"], blocks: Int[Array, "B c"]) -> Float[Array, "B K S H"]:
    """The chosen blocks of the pool, joined along the tokens."""
    batch, count = blocks.shape
    _, kv_heads, block_size, width = pool.shape
    chosen = pool[blocks].transpose(0, 2, 1, 3, 4)
    return chosen.reshape(batch, kv_heads, count * block_size, width)


def _fold(
    carry: _Softmax,
    q: Float[Array, "B T K G H"],
    keys: Float[Array, "B K S H"],
    values: Float[Array, "B K S H"],
    visible: Array,
) -> _Softmax:
    """Add one tile of keys to the running softmax.

    A tile that a query cannot see leaves its row as it was.
    """
    scores = jnp.einsum("btkgh,bksh->bkgts", q, keys, preferred_element_type=jnp.float32)
    mask = visible[:, None, None]
    scores = jnp.where(mask, scores * jnp.float32(q.shape[-1] ** -0.5), -jnp.inf)
    largest = jnp.maximum(carry.largest, jnp.max(scores, axis=-1))
    safe = jnp.where(jnp.isfinite(largest), largest, 0.0)
    weights = jnp.where(mask, jnp.exp(scores - safe[..., None]), 0.0)
    decay = jnp.where(jnp.isfinite(carry.largest), jnp.exp(carry.largest - safe), 0.0)
    mixed = jnp.einsum(
        "bkgts,bksh->bkgth",
        weights.astype(values.dtype),
        values,
        preferred_element_type=jnp.float32,
    )
    return _Softmax(
        largest,
        carry.total * decay + jnp.sum(weights, axis=-1),
        carry.mixed * decay[..., None] + mixed,
    )
