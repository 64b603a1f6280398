"""The definition in plain jax.numpy: tiles of the table, with an online softmax in float32."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .._compat import Target

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
    table = jnp.pad(block_table, ((0, 0), (0, padding)))

    def tile(index: Int[Array, ""], carry: _Softmax) -> _Softmax:
        first = index * blocks_per_tile
        blocks = jax.lax.dynamic_slice_in_dim(table, first, blocks_per_tile, axis=1)
        key_at = first * block_size + jnp.arange(blocks_per_tile * block_size, dtype=jnp.int32)
        visible = key_at[None, None, :] <= positions[:, :, None]
        if window is not None:
            inside = key_at[None, None, :] > positions[:, :, None] - window
            visible &= inside | (key_at < sinks)[None, None, :]
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


def refusals(
    target: Target,
    q: Any,
    key_blocks: Any,
    value_blocks: Any,
    block_table: Any,
    positions: Any,
    *,
    window: int | None,
    sinks: int,
) -> list[str]:
    """What gives a call no meaning; see `dispatch.Implementation`."""
    reasons = []
    query_heads, kv_heads = q.shape[2], key_blocks.shape[1]
    if query_heads % kv_heads:
        reasons.append(f"{query_heads} query heads cannot share {kv_heads} key/value heads evenly")
    if window is not None and window < 1:
        reasons.append(f"window is {window}; accepted is a number from 1 on, or None")
    if sinks < 0 or (sinks and window is None):
        reasons.append(f"sinks is {sinks}; accepted is 0, or a larger number beside a window")
    return reasons


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
