"""Attention over a block cache as Triton kernels: flash decoding.

The tokens of a sequence are cut in splits, one program each, since a few query heads alone would
leave most of the GPU idle. A program works through its split tile by tile with an online softmax;
a second small kernel joins the splits. The query heads of one key/value head are rows of one matrix
product, so keys and values are read once.

Letters of this file: S splits; C and R, see shape.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int, Real

from .._compat import dot, triton_call
from ..attention.rows import load_rows, store_rows
from ..attention.scales import BlockScales
from ..attention.softmax import LOWEST, softmax_scale
from .config import Config
from .shape import Shape

COMBINED_AT_ONCE = 8192


class Parts(NamedTuple):
    """What the splits found: an unfinished softmax of each.

    Splits that no program worked on hold anything.
    """

    mixed: Float[Array, "CSR H"]
    largest: Float[Array, "CS R"]
    total: Float[Array, "CS R"]


class _SequenceSpan(NamedTuple):
    """What the queries of one sequence see, as int32 scalars.

    Attributes:
        earliest: least position of a query.
        latest: greatest position of a query; -1 without queries.
        tiles: tiles that are seen.
        hidden: tiles that lie unseen between the sinks and the window.
        share: tiles a split.
    """

    earliest: Array
    latest: Array
    tiles: Array
    hidden: Array
    share: Array

    @classmethod
    def of(cls, shape: Shape, config: Config, positions_ref: Any, sequence: Array) -> _SequenceSpan:
        """What a sequence's queries see and how that is cut; the same in both kernels.

        Splits of all sequences have one size, chosen so that all programs together fill the device.
        """
        tile = config.tile
        sequences, tokens = pl.next_power_of_2(shape.batch), pl.next_power_of_2(shape.length)
        b = jax.lax.broadcasted_iota(jnp.int32, (sequences, tokens), 0)
        t = jax.lax.broadcasted_iota(jnp.int32, (sequences, tokens), 1)
        exists = (b < shape.batch) & (t < shape.length)
        at = plt.load(positions_ref.at[b, t], mask=exists, other=-1)
        latest = jnp.clip(jnp.max(at, axis=1), -1, shape.room - 1)
        earliest = jnp.min(jnp.where(at < 0, shape.room, at), axis=1)
        tiles = (latest + tile) // tile
        hidden = jnp.zeros_like(tiles)
        if shape.window is not None:
            first = jnp.clip(earliest - shape.window + 1, 0, shape.room) // tile
            hidden = jnp.maximum(first - _sink_tiles(shape, config), 0)
            tiles = jnp.maximum(tiles - hidden, 0)
        share = pl.cdiv(jnp.sum(tiles) * shape.kv_heads, config.programs)
        share = jnp.maximum(share, pl.cdiv(jnp.max(tiles), config.splits))
        own = jnp.arange(sequences, dtype=jnp.int32) == sequence

        def its(values: Array) -> Array:
            return jnp.sum(jnp.where(own, values, 0))

        return cls(its(earliest), its(latest), its(tiles), its(hidden), jnp.maximum(share, 1))


def _sink_tiles(shape: Shape, config: Config) -> int:
    """Tiles that hold the sinks."""
    return pl.cdiv(shape.sinks, config.tile)


def attend_splits(
    shape: Shape,
    config: Config,
    q: Float[Array, "BTN H"],
    keys: Real[Array, "PKZ H"],
    values: Real[Array, "PKZ H"],
    block_table: Int[Array, "B W"],
    positions: Int[Array, "B T"],
    scales: BlockScales | None,
) -> Float[Array, "BTN H"] | Parts:
    """The main kernel: the result, or its parts if there may be several splits."""
    parts, rows = shape.owners * config.splits, shape.rows
    out_shape = [jax.ShapeDtypeStruct(q.shape, q.dtype)]
    if config.splits > 1:
        out_shape = [
            jax.ShapeDtypeStruct((parts * rows, shape.width), jnp.float32),
            jax.ShapeDtypeStruct((parts, rows), jnp.float32),
            jax.ShapeDtypeStruct((parts, rows), jnp.float32),
        ]
    call = triton_call(
        functools.partial(_attend_split, shape, config),
        name="block_attention",
        grid=(shape.owners, config.splits),
        out_shape=out_shape,
        num_warps=config.num_warps,
        # A tile is two loads away from its product, the first being that of its block's number.
        num_stages=2 * config.ahead + 1,
    )
    scale_rows = None if scales is None else scales.rows()
    results = call(q, keys, values, block_table, positions, scale_rows)
    return Parts(*results) if config.splits > 1 else results[0]


class _Pools(NamedTuple):
    """What the loop reads."""

    key: Any  # [PKZ, H]
    value: Any
    table: Any  # [B, W]
    scales: BlockScales | None  # rows


def _attend_split(
    shape: Shape,
    config: Config,
    q_ref: Any,
    key_ref: Any,
    value_ref: Any,
    table_ref: Any,
    positions_ref: Any,
    scale_refs: BlockScales | None,
    *out_refs: Any,
) -> None:
    """One program of the main kernel: one split of what an owner's queries see."""
    splits, rows = config.splits, shape.rows
    # Before the branch: the interpreter knows no program ids inside, and what is loaded here does
    # not wait for the span.
    owner, split = pl.program_id(0), pl.program_id(1)
    sequence, head = owner // shape.kv_heads, owner % shape.kv_heads
    row = jnp.arange(rows, dtype=jnp.int32)
    used = jnp.minimum(row, shape.queries - 1)
    q = q_ref[shape.query_at(sequence, head, used), :]
    at = positions_ref[sequence, used // shape.group]
    span = _SequenceSpan.of(shape, config, positions_ref, sequence)
    first = split * span.share

    def work() -> None:
        pools = _Pools(key_ref, value_ref, table_ref, scale_refs)
        step = _step(shape, config, pools, sequence, head, span, q, at)
        start = (
            jnp.full((rows,), LOWEST, jnp.float32),
            jnp.zeros((rows,), jnp.float32),
            jnp.zeros((rows, shape.width), jnp.float32),
        )
        stop = jnp.minimum(first + span.share, span.tiles)
        largest, total, mixed = jax.lax.fori_loop(first, stop, step, start)
        if splits == 1:
            place = shape.query_at(sequence, head, row)
            mixed = mixed / jnp.where(total > 0, total, 1.0)[:, None]
        else:
            part = owner * splits + split
            place = part * rows + row
            out_refs[1][part, :] = largest
            out_refs[2][part, :] = total
        # Rows without a query get places of their own even though they are not stored: the
        # interpreter writes old values back there.
        store_rows(out_refs[0], place, row < shape.queries, mixed)

    if splits == 1:
        work()
    else:
        pl.when(first < span.tiles)(work)


def _step(
    shape: Shape,
    config: Config,
    pools: _Pools,
    sequence: Array,
    head: Array,
    span: _SequenceSpan,
    q: Array,
    at: Array,
) -> Callable[[Array, tuple[Array, ...]], tuple[Array, ...]]:
    """The loop's body: one tile of keys and values joins the online softmax."""
    tile, size, scale_refs = config.tile, shape.block_size, pools.scales

    def step(number: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        largest, total, mixed = carry
        if shape.window is not None:
            number = jnp.where(number < _sink_tiles(shape, config), number, number + span.hidden)
        token = number * tile + jnp.arange(tile, dtype=jnp.int32)
        visible = token[None, :] <= at[:, None]
        seen = token <= span.latest
        if shape.window is not None:
            sink = token < shape.sinks
            visible &= sink[None, :] | (token[None, :] > at[:, None] - shape.window)
            seen &= sink | (token > span.earliest - shape.window)

        # One number for the whole tile where it lies in one block, else one for each token.
        column = (number * tile if tile <= size else token) // size
        block = pools.table[sequence, jnp.minimum(column, shape.columns - 1)]
        block = jnp.clip(block, 0, shape.blocks - 1)
        place = (block * shape.kv_heads + head) * size + token % size
        # Rows that no query sees may hold anything, so they are not read.
        keys, values = (load_rows(ref, place, seen) for ref in (pools.key, pools.value))
        rows = (scale_refs or ())[:2]
        scales = [plt.load(ref.at[place], mask=seen, other=0.0) for ref in rows]

        # Codes are exact in q's dtype. What they stand for is put in behind the products.
        scores = dot(q, keys.astype(q.dtype).T)
        if scale_refs is not None:
            base = scale_refs.key_base[block * shape.kv_heads + head, :].astype(jnp.float32)
            from_base = jnp.sum(q.astype(jnp.float32) * base[None, :], axis=1)
            scores = scores * scales[0][None, :] + from_base[:, None]
        scores = jnp.where(visible, scores * softmax_scale(shape.width), LOWEST)
        new = jnp.maximum(largest, jnp.max(scores, axis=1))
        weights = jnp.where(visible, jnp.exp2(scores - new[:, None]), 0.0)
        decay = jnp.exp2(largest - new)
        total = total * decay + jnp.sum(weights, axis=1)
        if scale_refs is not None:
            weights = weights * scales[1][None, :]
        mixed = mixed * decay[:, None] + dot(weights.astype(q.dtype), values.astype(q.dtype))
        return new, total, mixed

    return step


def combine(
    shape: Shape, config: Config, dtype: jnp.dtype, parts: Parts, positions: Int[Array, "B T"]
) -> Float[Array, "BTN H"]:
    """The second kernel: joins the splits of each query."""
    splits = config.splits
    width = max(16, min(shape.width, COMBINED_AT_ONCE // splits))

    def kernel(mixed_ref, largest_ref, total_ref, positions_ref, out_ref) -> None:
        owner, row, piece = (pl.program_id(axis) for axis in range(3))
        sequence, head = owner // shape.kv_heads, owner % shape.kv_heads
        span = _SequenceSpan.of(shape, config, positions_ref, sequence)
        split = jnp.arange(splits, dtype=jnp.int32)
        used = split * span.share < span.tiles
        part = owner * splits + split
        its_row = jnp.full_like(part, row)
        largest = plt.load(largest_ref.at[part, its_row], mask=used, other=LOWEST)
        total = plt.load(total_ref.at[part, its_row], mask=used, other=0.0)
        weight = jnp.exp2(largest - jnp.max(largest))
        total = jnp.sum(weight * total)
        column = jax.lax.broadcasted_iota(jnp.int32, (splits, width), 1) + piece * width
        mixed = load_rows(mixed_ref, part * shape.rows + row, used, column)
        mixed = jnp.sum(mixed * weight[:, None], axis=0) / jnp.where(total > 0, total, 1.0)
        place = shape.query_at(sequence, head, row)
        out_ref[place, pl.ds(piece * width, width)] = mixed.astype(dtype)

    call = triton_call(
        kernel,
        name="block_attention_combine",
        grid=(shape.owners, shape.queries, shape.width // width),
        out_shape=jax.ShapeDtypeStruct((shape.owners * shape.queries, shape.width), dtype),
        num_warps=4,
        num_stages=1,
    )
    return call(*parts, positions)
