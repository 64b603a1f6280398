"""Some tokens, of which several share experts: an expert's tile is decoded once for all of them.

The slots of an expert are a row of a table, or several, of so many each. A program owns some
outputs of a row, on tensor cores; programs of slots that are not the first of a row end at once.
Nothing is added to by two programs: what slots make lies by slot, and a third launch sums it. The
shared expert is made by further programs of both launches, as for few tokens.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from .._compat import triton_call
from ..dequant_matmul import tile
from ..dequant_matmul.layout import UNIT
from ..dequant_matmul.operands import Shape, iota, load
from ..dequant_matmul.qtensor import QTensor
from ..dequant_matmul.turn import THREADS, column_of, place_of, turned
from . import combine
from .beside import Down, GateUp
from .config import SomeTokens
from .matrix import Coded, arrays_of, matrix_of
from .shared import SharedExpert


def some_tokens(
    x: Float[Array, "M D"],
    ids: Int[Array, "M A"],
    weights: Float[Array, "M A"],
    gate_up_proj: QTensor,
    down_proj: QTensor,
    shared: SharedExpert | None,
    residual: Float[Array, "M D"] | None,
    inner_dtype: Any,
    dtype: Any,
    config: SomeTokens,
) -> Float[Array, "M D"]:
    """See `api.expert_dispatch`; stacks are in codes, `inner_dtype` is bfloat16."""
    experts = down_proj.shape[0]
    rows = rows_of_experts(ids, experts, config.gate_up.rows)
    made, *own = gated(x, rows, ids.shape[1], gate_up_proj, down_proj, shared, config)
    y, *beside = down(made, own, rows, down_proj, shared, config)
    return combine.summed(y, ids, weights, experts, dtype, beside[0] if beside else None, residual)


def rows_of_experts(
    ids: Int[Array, "M A"], experts: int, rows: int
) -> tuple[Int[Array, " S"], Int[Array, "S R"]]:
    """For each slot that is the first of a row: its expert, and the slots of the row.

    Args:
        ids: experts.
        experts: E; slots with other ids are in no row.
        rows: most slots of one.

    Returns:
        Experts, -1 where a slot is not the first; slots, S where a row has no more.
    """
    flat = ids.reshape(-1)
    index = jnp.arange(flat.size, dtype=jnp.int32)
    filled = (flat >= 0) & (flat < experts)
    alike = (flat[:, None] == flat[None, :]) & filled[None, :]
    rank = jnp.sum(alike & (index[None, :] < index[:, None]), axis=1, dtype=jnp.int32)
    behind = jnp.where(alike, rank[None, :] - rank[:, None], -1)
    taken = behind[:, None, :] == jnp.arange(rows, dtype=jnp.int32)[None, :, None]
    slots = jnp.min(jnp.where(taken, index[None, None, :], flat.size), axis=2)
    return jnp.where(filled & (rank % rows == 0), flat, -1), slots


def gated(
    x: Float[Array, "M D"],
    rows: tuple[Int[Array, " S"], Int[Array, "S R"]],
    slots: int,
    weight: QTensor,
    below: QTensor,
    shared: SharedExpert | None,
    config: SomeTokens,
) -> tuple[Array, ...]:
    """Silu(gate) * up of each slot, in bfloat16, turned as the down projections need it.

    Args:
        x: tokens.
        rows: of experts.
        slots: of each token.
        weight: gates and the rows above of all experts.
        below: down projections of all experts.
        shared: expert.
        config: see there.

    Returns:
        [copies * S, F and more], whose columns behind F hold anything; and what `beside.GateUp`
        makes.
    """
    cut, hidden = config.gate_up, weight.shape[1] // 2
    shape = _shape(weight, hidden)
    tiles = pl.cdiv(hidden, cut.outputs)
    columns = pl.cdiv(hidden, config.down.units * UNIT) * config.down.units * UNIT
    order, order_below = tile.order(shape), tile.order(_shape(below, 0))
    arrays = [x, turned(x.astype(jnp.bfloat16), cut.units, *order), *rows, *arrays_of(weight)]
    beside = GateUp(x.shape[0], shared, jnp.bfloat16, config.beside)
    first_own, programs = len(arrays), rows[0].size * tiles

    def kernel(*refs: Any) -> None:
        program = pl.program_id(0) - beside.programs
        x_ref, turned_ref, experts_ref, slots_ref, *of_experts = refs[:first_own]
        slot, first = program // tiles, program % tiles * cut.outputs

        @pl.when(program >= 0)
        def _() -> None:
            expert = experts_ref[slot]

            @pl.when(expert >= 0)
            def _() -> None:
                mine = load(slots_ref, jnp.full((cut.rows,), slot, jnp.int32), _range(cut.rows))
                inputs = functools.partial(_gathered, turned_ref, mine, slots, order, None)
                row = expert * (2 * hidden)
                matrices = [(tuple(of_experts), row), (tuple(of_experts), row + hidden)]
                steps = 0, pl.cdiv(shape.units, cut.units)
                gate, up = tile.products(shape, cut, matrices, first, steps, inputs)
                made = (gate * jax.lax.logistic(gate) * up).astype(jnp.bfloat16)
                _store_turned(
                    refs[first_own + beside.count], mine, first, hidden, made, order_below
                )

        beside.run(program + beside.programs, x_ref, refs[first_own:])

    struct = jax.ShapeDtypeStruct((order_below[1] * rows[0].size, columns), jnp.bfloat16)
    return tuple(
        triton_call(
            kernel,
            num_warps=cut.num_warps,
            num_stages=cut.num_stages,
            name="expert_dispatch_gate_up",
            grid=(beside.programs + programs,),
            out_shape=[struct, *beside.shapes],
        )(*arrays, *beside.arrays)
    )


def down(
    made: Float[Array, "CS F"],
    own: list[Array],
    rows: tuple[Int[Array, " S"], Int[Array, "S R"]],
    weight: QTensor,
    shared: SharedExpert | None,
    config: SomeTokens,
) -> tuple[Array, ...]:
    """Down projections of each slot, in float32.

    Args:
        made: by `gated`.
        own: what it made of the shared expert.
        rows: of experts.
        weight: of all experts.
        shared: expert.
        config: see there.

    Returns:
        [S, D], in slots that are not filled anything; and the shared expert's part [M, D].
    """
    cut, (width, hidden) = config.down, weight.shape[1:]
    shape = _shape(weight, width)
    order = tile.order(shape)
    last = None if made.shape[1] == hidden else hidden
    tiles = pl.cdiv(width, cut.outputs)
    arrays = [made, *rows, *arrays_of(weight)]
    beside = Down(own, shared, width, config.beside.down)
    first_own, programs = len(arrays), rows[0].size * tiles

    def kernel(*refs: Any) -> None:
        program = pl.program_id(0) - beside.programs
        made_ref, experts_ref, slots_ref, *of_experts = refs[:first_own]
        slot, first = program // tiles, program % tiles * cut.outputs

        @pl.when(program >= 0)
        def _() -> None:
            expert = experts_ref[slot]

            @pl.when(expert >= 0)
            def _() -> None:
                mine = load(slots_ref, jnp.full((cut.rows,), slot, jnp.int32), _range(cut.rows))
                inputs = functools.partial(_gathered, made_ref, mine, 1, order, last)
                matrices = [(tuple(of_experts), expert * width)]
                steps = 0, pl.cdiv(shape.units, cut.units)
                [y] = tile.products(shape, cut, matrices, first, steps, inputs)
                out_ref, size = refs[first_own + beside.count], (cut.outputs, cut.rows)
                column, slot_of = first + iota(size, 0), jnp.broadcast_to(mine[None, :], size)
                mask = (slot_of < experts_ref.shape[0]) & (column < width)
                plt.store(out_ref.at[slot_of, column], y, mask=mask)

        beside.run(program + beside.programs, refs[first_own:])

    struct = jax.ShapeDtypeStruct((rows[0].size, width), jnp.float32)
    return tuple(
        triton_call(
            kernel,
            num_warps=cut.num_warps,
            num_stages=cut.num_stages,
            name="expert_dispatch_down",
            grid=(beside.programs + programs,),
            out_shape=[struct, *beside.shapes],
        )(*arrays, *beside.arrays)
    )


def _shape(weight: QTensor, outputs: int) -> Shape:
    """Of products with so many of an expert's outputs."""
    matrix = matrix_of(weight)
    assert isinstance(matrix, Coded)
    return dataclasses.replace(matrix.shape, outputs=outputs)


def _gathered(
    ref: Any, mine: Any, slots: int, order: tuple[int, int], last: int | None, unit: Any, width: int
) -> Float[Array, "gm i"]:
    """The inputs of the slots of a row, see `tile.Inputs`.

    Args:
        ref: rows of inputs, one for so many slots, in copies.
        mine: slots, past the last where there are no more.
        slots: see `ref`.
        order: of the inputs, see `tile.order`.
        last: number of inputs that exist; all of them if None.
        unit: first.
        width: number of inputs.
    """
    part, copies = order
    rows, size = ref.shape[0] // copies, (copies * mine.shape[0], width)
    slot = jnp.broadcast_to(mine[None, :, None], (copies, mine.shape[0], width)).reshape(size)
    place = unit * UNIT + iota(size, 1)
    mask = slot < slots * rows
    if last is not None:
        mask = mask & (column_of(place, part) < last)
    copy = jax.lax.div(iota(size, 0), mine.shape[0])
    return load(ref, copy * rows + jax.lax.div(slot, slots), place, mask=mask)


def _store_turned(
    ref: Any, mine: Any, first: Any, columns: int, made: Float[Array, "o m"], order: tuple[int, int]
) -> None:
    """Write a program's numbers for the slots of a row, in an order, and zeros in other copies.

    Args:
        ref: rows of slots, in copies.
        mine: slots, past the last where there are no more.
        first: column of the program.
        columns: number of them.
        made: numbers of columns.
        order: see `tile.order`.
    """
    part, copies = order
    slots, column = ref.shape[0] // copies, first + iota(made.shape, 0)
    slot = jnp.broadcast_to(mine[None, :], made.shape)
    mask = (slot < slots) & (column < columns)
    for copy in range(copies):
        own = made
        if copies > 1:
            own = jnp.where(column // part % THREADS // (THREADS // copies) == copy, made, 0)
        # What is masked must not be at the place of another copy.
        row = jnp.where(mask, copy * slots + slot, ref.shape[0])
        plt.store(ref.at[row, place_of(column, part)], own, mask=mask)


def _range(count: int) -> Int[Array, " r"]:
    return jax.lax.iota(jnp.int32, count)
