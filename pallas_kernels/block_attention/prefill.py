"""Attention of many new tokens over a block cache as a Triton kernel.

A program attends for a tile of the queries that share a key/value head of a sequence. Where those
are too few to fill the device, several programs share the tokens that they see, and their findings
are joined afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Bool, Float, Int

from .._compat import Target, current_target, triton_call
from ..attention_cut import Cut
from ..attention_cut import heuristic as cut_for
from ..tiled_attention import Load, Sight, attend, load_rows, softmax_scale, store_rows


def heuristic(target: Target, q: Any, key_blocks: Any, block_table: Any) -> Cut:
    """A cut for these shapes on this device."""
    _, kv_heads, size, _ = key_blocks.shape
    # The scales of a tile are those of one block.
    most = size if key_blocks.dtype == jnp.int8 else 128
    context = block_table.shape[1] * size
    return cut_for(target, q, kv_heads, most_tile=most, context=context)


def prefill(
    q: Float[Array, "B T N H"],
    key_blocks: Array,
    value_blocks: Array,
    block_table: Int[Array, "B W"],
    positions: Int[Array, "B T"],
    scales: Any = None,
    *,
    window: int | None,
    sinks: int,
    cut: Cut | None = None,
) -> Float[Array, "B T N H"]:
    """See `api.block_attention`; `cut` is the heuristic's if None."""
    if cut is None:
        cut = heuristic(current_target(), q, key_blocks, block_table)
    batch, length, heads, width = q.shape
    kv_heads, size = key_blocks.shape[1:3]
    group, room = heads // kv_heads, block_table.shape[1] * size
    tiles = pl.cdiv(length * group, cut.rows)

    def kernel(q_ref, key_ref, value_ref, table_ref, positions_ref, *refs) -> None:
        scale_refs, out_refs = (refs[:3], refs[3:]) if scales is not None else (None, refs)
        part, owner = pl.program_id(0), pl.program_id(1)
        sequence, head = owner // kv_heads, owner % kv_heads
        # The last queries see most, so they go first.
        number, split = tiles - 1 - part // cut.splits, part % cut.splits
        row = number * cut.rows + jnp.arange(cut.rows, dtype=jnp.int32)
        token = row // group
        exists = token < length
        at = plt.load(
            positions_ref.at[jnp.full_like(token, sequence), token], mask=exists, other=-1
        )
        first = jnp.zeros_like(at) if window is None else jnp.maximum(at - window + 1, 0)
        sight = Sight(first, jnp.minimum(at, room - 1), sinks)
        place = ((sequence * length + token) * kv_heads + head) * group + row % group
        q = load_rows(q_ref, place, sight.any)
        shape = (*key_blocks.shape, block_table.shape[1])
        find = _find(shape, cut.tile, table_ref, sequence, head)
        load = _load(find, key_ref, value_ref, scale_refs, q.dtype)
        state = attend(q, sight, load, cut, patient=False, split=split)
        if cut.splits == 1:
            store_rows(out_refs[0], place, exists, state.result(sight.any))
            return
        place += split * (batch * length * heads)
        store_rows(out_refs[0], place, exists, state.mixed)
        plt.store(out_refs[1].at[place], state.largest * softmax_scale(width), mask=exists)
        plt.store(out_refs[2].at[place], jnp.where(sight.any, state.total, 0.0), mask=exists)

    rows = batch * length * heads
    out_shape = [jax.ShapeDtypeStruct((rows, width), q.dtype)]
    if cut.splits > 1:
        out_shape = [
            jax.ShapeDtypeStruct((cut.splits * rows, width), jnp.float32),
            jax.ShapeDtypeStruct((cut.splits * rows,), jnp.float32),
            jax.ShapeDtypeStruct((cut.splits * rows,), jnp.float32),
        ]
    call = triton_call(
        kernel,
        name="block_attention_prefill",
        grid=(tiles * cut.splits, batch * kv_heads),
        out_shape=out_shape,
        num_warps=cut.num_warps,
        num_stages=cut.num_stages,
    )
    flat = [x.reshape(-1, width) for x in (q, key_blocks, value_blocks)]
    if scales is not None:
        key_scale, value_scale, key_base = scales
        extra = (key_scale.reshape(-1), value_scale.reshape(-1), key_base.reshape(-1, width))
        results = call(*flat, block_table, positions, *extra)
    else:
        results = call(*flat, block_table, positions)
    if cut.splits == 1:
        return results[0].reshape(q.shape)
    parts = (x.reshape(cut.splits, rows, -1) for x in results)
    return _joined(*parts).reshape(q.shape).astype(q.dtype)


def _find(
    shape: tuple[int, ...], tile: int, table_ref: Any, sequence: Array, head: Array
) -> Callable[[Array], tuple[Array, Array]]:
    """Where the tokens of a tile lie: their rows of the pool, and the block and head of each."""
    blocks, kv_heads, size, _, columns = shape

    def find(number: Array) -> tuple[Array, Array]:
        within = jnp.arange(tile, dtype=jnp.int32)
        # One number for the whole tile where it lies in one block, else one for each token.
        if tile <= size:
            column = number // (size // tile)
            within += number % (size // tile) * tile
        else:
            column = number * (tile // size) + within // size
            within %= size
        block = table_ref[sequence, jnp.minimum(column, columns - 1)]
        block = jnp.clip(block, 0, blocks - 1) * kv_heads + head
        return block * size + within, block

    return find


def _load(
    find: Callable[[Array], tuple[Array, Array]],
    key_ref: Any,
    value_ref: Any,
    scale_refs: tuple[Any, Any, Any] | None,
    dtype: Any,
) -> Load:
    """Reads a tile; see `tiled_attention.Load`. Codes of int8 become keys and values of `dtype`."""

    def load(number: Array, wanted: Bool[Array, " S"] | None) -> tuple[Array, Array]:
        place, block = find(number)
        keys, values = (load_rows(ref, place, wanted) for ref in (key_ref, value_ref))
        if scale_refs is None:
            return keys, values
        other = None if wanted is None else 0.0
        key_scale, value_scale = (
            plt.load(ref.at[place], mask=wanted, other=other)[:, None] for ref in scale_refs[:2]
        )
        base = scale_refs[2][block, :].astype(jnp.float32)[None, :]
        keys = keys.astype(jnp.float32) * key_scale + base
        return keys.astype(dtype), (values.astype(jnp.float32) * value_scale).astype(dtype)

    return load


def _joined(
    mixed: Float[Array, "S R H"], largest: Float[Array, "S R 1"], total: Float[Array, "S R 1"]
) -> Float[Array, "R H"]:
    """What the programs that share rows found, as one softmax."""
    weight = jnp.exp2(largest - jnp.max(largest, axis=0, keepdims=True))
    total = jnp.sum(weight * total, axis=0)
    mixed = jnp.sum(weight * mixed, axis=0)
    return jnp.where(total > 0, mixed / total, 0.0)
