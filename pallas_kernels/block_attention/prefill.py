"""Attention of many new tokens over a block cache as a Triton kernel.

A program attends for a tile of the queries that share a key/value head of a sequence. Where those
are too few to fill the device, several programs share the tokens that they see, and their findings
are joined afterwards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Bool, Float, Int, Real

from .._compat import Target, current_target, triton_call
from ..attention.cut import Cut, cut_for
from ..attention.rows import flat_rows, load_rows, store_rows
from ..attention.scales import BlockScales
from ..attention.softmax import softmax_scale
from ..attention.tiles import Load, Sight, attend_tiles
from .shape import Shape


def block_cut(target: Target, q: Any, key_blocks: Any, block_table: Any) -> Cut:
    """A cut for these shapes on this device."""
    _, kv_heads, size, _ = key_blocks.shape
    # The scales of a tile are those of one block.
    most = size if key_blocks.dtype == jnp.int8 else 128
    context = block_table.shape[1] * size
    return cut_for(target, q, kv_heads, most_tile=most, context=context)


def prefill(
    q: Float[Array, "B T N H"],
    key_blocks: Real[Array, "P K Z H"],
    value_blocks: Real[Array, "P K Z H"],
    block_table: Int[Array, "B W"],
    positions: Int[Array, "B T"],
    scales: BlockScales | None = None,
    *,
    window: int | None,
    sinks: int,
    cut: Cut | None = None,
) -> Float[Array, "B T N H"]:
    """See `api.block_attention`; `cut` is that of `block_cut` if None."""
    if cut is None:
        cut = block_cut(current_target(), q, key_blocks, block_table)
    shape = Shape.of(q, key_blocks, block_table, window=window, sinks=sinks)
    rows = shape.owners * shape.queries
    out_shape = [jax.ShapeDtypeStruct((rows, shape.width), q.dtype)]
    if cut.splits > 1:
        out_shape = [
            jax.ShapeDtypeStruct((cut.splits * rows, shape.width), jnp.float32),
            jax.ShapeDtypeStruct((cut.splits * rows,), jnp.float32),
            jax.ShapeDtypeStruct((cut.splits * rows,), jnp.float32),
        ]
    call = triton_call(
        functools.partial(_attend_tile, shape, cut),
        name="block_attention_prefill",
        grid=(cut.tiles(shape.queries) * cut.splits, shape.owners),
        out_shape=out_shape,
        num_warps=cut.num_warps,
        num_stages=cut.num_stages,
    )
    matrices = (flat_rows(x) for x in (q, key_blocks, value_blocks))
    scale_rows = None if scales is None else scales.rows()
    results = call(*matrices, block_table, positions, scale_rows)
    if cut.splits == 1:
        return results[0].reshape(q.shape)
    parts = (x.reshape(cut.splits, rows, -1) for x in results)
    return _joined(*parts).reshape(q.shape).astype(q.dtype)


def _attend_tile(
    shape: Shape,
    cut: Cut,
    q_ref: Any,
    key_ref: Any,
    value_ref: Any,
    table_ref: Any,
    positions_ref: Any,
    scale_refs: BlockScales | None,
    *out_refs: Any,
) -> None:
    """One program: a tile of an owner's queries, and one split of the tokens that they see."""
    part, owner = pl.program_id(0), pl.program_id(1)
    sequence, head = owner // shape.kv_heads, owner % shape.kv_heads
    # The last queries see most, so they go first.
    number, split = cut.tiles(shape.queries) - 1 - part // cut.splits, part % cut.splits
    row = number * cut.rows + jnp.arange(cut.rows, dtype=jnp.int32)
    token = row // shape.group
    exists = token < shape.length
    at = plt.load(positions_ref.at[jnp.full_like(token, sequence), token], mask=exists, other=-1)
    first = jnp.zeros_like(at)
    if shape.window is not None:
        first = jnp.maximum(at - shape.window + 1, 0)
    sight = Sight(first, jnp.minimum(at, shape.room - 1), shape.sinks)
    place = shape.query_at(sequence, head, row)
    q = load_rows(q_ref, place, sight.any)
    find = _find(shape, cut.tile, table_ref, sequence, head)
    load = _load(find, key_ref, value_ref, scale_refs, q.dtype)
    state = attend_tiles(q, sight, load, cut, patient=False, split=split)
    if cut.splits == 1:
        store_rows(out_refs[0], place, exists, state.result(sight.any))
        return
    place += split * (shape.owners * shape.queries)
    store_rows(out_refs[0], place, exists, state.mixed)
    largest = state.largest * softmax_scale(shape.width)
    plt.store(out_refs[1].at[place], largest, mask=exists)
    plt.store(out_refs[2].at[place], jnp.where(sight.any, state.total, 0.0), mask=exists)


def _find(
    shape: Shape, tile: int, table_ref: Any, sequence: Array, head: Array
) -> Callable[[Array], tuple[Array, Array]]:
    """Where the tokens of a tile lie: their rows of the pool, and the block and head of each."""
    size = shape.block_size

    def find(number: Array) -> tuple[Array, Array]:
        within = jnp.arange(tile, dtype=jnp.int32)
        # One number for the whole tile where it lies in one block, else one for each token.
        if tile <= size:
            column = number // (size // tile)
            within += number % (size // tile) * tile
        else:
            column = number * (tile // size) + within // size
            within %= size
        block = table_ref[sequence, jnp.minimum(column, shape.columns - 1)]
        block = jnp.clip(block, 0, shape.blocks - 1) * shape.kv_heads + head
        return block * size + within, block

    return find


def _load(
    find: Callable[[Array], tuple[Array, Array]],
    key_ref: Any,
    value_ref: Any,
    scale_refs: BlockScales | None,
    dtype: Any,
) -> Load:
    """Reads a tile; see `attention.tiles.Load`. Codes of int8 become keys and values of `dtype`."""

    def load(number: Array, wanted: Bool[Array, " S"] | None) -> tuple[Array, Array]:
        place, block = find(number)
        keys, values = (load_rows(ref, place, wanted) for ref in (key_ref, value_ref))
        if scale_refs is None:
            return keys, values
        other = None if wanted is None else 0.0
        key_scale, value_scale = (
            plt.load(ref.at[place], mask=wanted, other=other)[:, None] for ref in scale_refs[:2]
        )
        base = scale_refs.key_base[block, :].astype(jnp.float32)[None, :]
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
