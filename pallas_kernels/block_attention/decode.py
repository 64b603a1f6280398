"""Attention over a block cache as Triton kernels: flash decoding.

The tokens of a sequence are cut in splits, one program each, since a few query heads alone would
leave most of the GPU idle. A program works through its split tile by tile with an online softmax;
a second small kernel joins the splits. The query heads of one key/value head are rows of one matrix
product, so keys and values are read once.

Letters of this file: S splits; C and R, see shape.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Bool, Float, Int, Real

from .._compat import dot, triton_call
from .scales import BlockScales
from .shape import Shape

LOWEST = float(jnp.finfo(jnp.float32).min)
COMBINED_AT_ONCE = 8192


class Parts(NamedTuple):
    """What the splits found: an unfinished softmax of each.

    Splits that no program worked on hold anything.
    """

    mixed: Float[Array, "CSR H"]
    largest: Float[Array, "CS R"]
    total: Float[Array, "CS R"]


class _Span(NamedTuple):
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


def _span(shape: Shape, positions_ref: Any, sequence: Array) -> _Span:
    """What a sequence's queries see and how that is cut; the same in both kernels.

    Splits of all sequences have one size, chosen so that all programs together fill the device.
    """
    tile = shape.config.tile
    sequences, tokens = pl.next_power_of_2(shape.batch), pl.next_power_of_2(shape.length)
    b = jax.lax.broadcasted_iota(jnp.int32, (sequences, tokens), 0)
    t = jax.lax.broadcasted_iota(jnp.int32, (sequences, tokens), 1)
    exists = (b < shape.batch) & (t < shape.length)
    at = plt.load(positions_ref.at[b, t], mask=exists, other=-1)
    room = shape.columns * shape.block_size
    latest = jnp.clip(jnp.max(at, axis=1), -1, room - 1)
    earliest = jnp.min(jnp.where(at < 0, room, at), axis=1)
    tiles = (latest + tile) // tile
    hidden = jnp.zeros_like(tiles)
    if shape.window is not None:
        first = jnp.clip(earliest - shape.window + 1, 0, room) // tile
        hidden = jnp.maximum(first - shape.sink_tiles, 0)
        tiles = jnp.maximum(tiles - hidden, 0)
    share = pl.cdiv(jnp.sum(tiles) * shape.kv_heads, shape.config.programs)
    share = jnp.maximum(share, pl.cdiv(jnp.max(tiles), shape.config.splits))
    own = jnp.arange(sequences, dtype=jnp.int32) == sequence

    def its(values: Array) -> Array:
        return jnp.sum(jnp.where(own, values, 0))

    return _Span(its(earliest), its(latest), its(tiles), its(hidden), jnp.maximum(share, 1))


def attend(
    shape: Shape,
    q: Float[Array, "BTN H"],
    keys: Real[Array, "PKZ H"],
    values: Real[Array, "PKZ H"],
    block_table: Int[Array, "B W"],
    positions: Int[Array, "B T"],
    scales: BlockScales | None,
) -> Float[Array, "BTN H"] | Parts:
    """The main kernel: the result, or its parts if there may be several splits."""
    splits, rows, width = shape.config.splits, shape.rows, shape.width

    inputs = (q, keys, values, block_table, positions, *_as_rows(scales))

    def kernel(*refs: Any) -> None:
        q_ref, key_ref, value_ref, table_ref, positions_ref = refs[:5]
        scale_refs, out_refs = refs[5 : len(inputs)], refs[len(inputs) :]
        # Before the branch: the interpreter knows no program ids inside, and what is loaded here
        # does not wait for the span.
        owner, split = pl.program_id(0), pl.program_id(1)
        sequence, head = owner // shape.kv_heads, owner % shape.kv_heads
        row = jnp.arange(rows, dtype=jnp.int32)
        used = jnp.minimum(row, shape.queries - 1)
        q = q_ref[shape.query_at(sequence, head, used), :]
        at = positions_ref[sequence, used // shape.group]
        span = _span(shape, positions_ref, sequence)
        first = split * span.share

        def work() -> None:
            pools = (key_ref, value_ref, table_ref, *scale_refs)
            step = _step(shape, pools, sequence, head, span, q, at)
            start = (
                jnp.full((rows,), LOWEST, jnp.float32),
                jnp.zeros((rows,), jnp.float32),
                jnp.zeros((rows, width), jnp.float32),
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
            _store_rows(out_refs[0], place, row < shape.queries, mixed)

        if splits == 1:
            work()
        else:
            pl.when(first < span.tiles)(work)

    parts = shape.owners * splits
    out_shape = [jax.ShapeDtypeStruct(q.shape, q.dtype)]
    if splits > 1:
        out_shape = [
            jax.ShapeDtypeStruct((parts * rows, width), jnp.float32),
            jax.ShapeDtypeStruct((parts, rows), jnp.float32),
            jax.ShapeDtypeStruct((parts, rows), jnp.float32),
        ]
    call = triton_call(
        kernel,
        name="block_attention",
        grid=(shape.owners, splits),
        out_shape=out_shape,
        num_warps=shape.config.num_warps,
        # A tile is two loads away from its product, the first being that of its block's number.
        num_stages=2 * shape.config.ahead + 1,
    )
    results = call(*inputs)
    return Parts(*results) if splits > 1 else results[0]


def _step(
    shape: Shape,
    refs: tuple[Any, ...],
    sequence: Array,
    head: Array,
    span: _Span,
    q: Array,
    at: Array,
) -> Callable[[Array, tuple[Array, ...]], tuple[Array, ...]]:
    """The loop's body: one tile of keys and values joins the online softmax."""
    key_ref, value_ref, table_ref = refs[:3]
    tile, size = shape.config.tile, shape.block_size

    def step(number: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        largest, total, mixed = carry
        if shape.window is not None:
            number = jnp.where(number < shape.sink_tiles, number, number + span.hidden)
        token = number * tile + jnp.arange(tile, dtype=jnp.int32)
        visible = token[None, :] <= at[:, None]
        seen = token <= span.latest
        if shape.window is not None:
            sink = token < shape.sinks
            visible &= sink[None, :] | (token[None, :] > at[:, None] - shape.window)
            seen &= sink | (token > span.earliest - shape.window)

        # One number for the whole tile where it lies in one block, else one for each token.
        column = (number * tile if tile <= size else token) // size
        block = table_ref[sequence, jnp.minimum(column, shape.columns - 1)]
        block = jnp.clip(block, 0, shape.blocks - 1)
        place = (block * shape.kv_heads + head) * size + token % size
        # Rows that no query sees may hold anything, so they are not read.
        keys = _load_rows(key_ref, place, seen)
        values = _load_rows(value_ref, place, seen)
        scales = [plt.load(ref.at[place], mask=seen, other=0.0) for ref in refs[3:5]]

        # Codes are exact in q's dtype. What they stand for is put in behind the products.
        scores = dot(q, keys.astype(q.dtype).T)
        if shape.coded:
            base = refs[5][block * shape.kv_heads + head, :].astype(jnp.float32)
            from_base = jnp.sum(q.astype(jnp.float32) * base[None, :], axis=1)
            scores = scores * scales[0][None, :] + from_base[:, None]
        scores = jnp.where(visible, scores * shape.scale, LOWEST)
        new = jnp.maximum(largest, jnp.max(scores, axis=1))
        weights = jnp.where(visible, jnp.exp2(scores - new[:, None]), 0.0)
        decay = jnp.exp2(largest - new)
        total = total * decay + jnp.sum(weights, axis=1)
        if shape.coded:
            weights = weights * scales[1][None, :]
        mixed = mixed * decay[:, None] + dot(weights.astype(q.dtype), values.astype(q.dtype))
        return new, total, mixed

    return step


def combine(
    shape: Shape, dtype: jnp.dtype, parts: Parts, positions: Int[Array, "B T"]
) -> Float[Array, "BTN H"]:
    """The second kernel: joins the splits of each query."""
    splits = shape.config.splits
    width = max(16, min(shape.width, COMBINED_AT_ONCE // splits))

    def kernel(mixed_ref, largest_ref, total_ref, positions_ref, out_ref) -> None:
        owner, row, piece = (pl.program_id(axis) for axis in range(3))
        sequence, head = owner // shape.kv_heads, owner % shape.kv_heads
        span = _span(shape, positions_ref, sequence)
        split = jnp.arange(splits, dtype=jnp.int32)
        used = split * span.share < span.tiles
        part = owner * splits + split
        its_row = jnp.full_like(part, row)
        largest = plt.load(largest_ref.at[part, its_row], mask=used, other=LOWEST)
        total = plt.load(total_ref.at[part, its_row], mask=used, other=0.0)
        weight = jnp.exp2(largest - jnp.max(largest))
        total = jnp.sum(weight * total)
        mixed = _load_rows(mixed_ref, part * shape.rows + row, used, piece, width)
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


def _as_rows(scales: BlockScales | None) -> tuple[Array, ...]:
    """Scales as the kernel indexes them: like the rows of a pool, and a row for each base."""
    if scales is None:
        return ()
    width = scales.key_base.shape[-1]
    return (
        scales.key_scale.reshape(-1),
        scales.value_scale.reshape(-1),
        scales.key_base.reshape(-1, width),
    )


def _load_rows(
    ref: Any, place: Int[Array, " r"], wanted: Bool[Array, " r"], piece: Any = 0, width: int = 0
) -> Array:
    """Rows of a matrix, or a piece of this width of each; zero where not wanted."""
    shape = (place.shape[0], width or ref.shape[1])
    row, column = _grid(place, shape)
    wanted = jnp.broadcast_to(wanted[:, None], shape)
    return plt.load(ref.at[row, column + piece * shape[1]], mask=wanted, other=0)


def _store_rows(
    ref: Any, place: Int[Array, " r"], wanted: Bool[Array, " r"], values: Array
) -> None:
    row, column = _grid(place, values.shape)
    wanted = jnp.broadcast_to(wanted[:, None], values.shape)
    plt.store(ref.at[row, column], values.astype(ref.dtype), mask=wanted)


def _grid(place: Int[Array, " r"], shape: tuple[int, ...]) -> tuple[Array, Array]:
    row = jnp.broadcast_to(place[:, None], shape)
    return row, jax.lax.broadcasted_iota(jnp.int32, shape, 1)
