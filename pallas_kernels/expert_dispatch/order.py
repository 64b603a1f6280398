"""What comes before products of tokens that share experts, in one launch of short programs.

Some make a table of which slots share an expert, a slot each. Others bring tokens into the orders
in which tensor cores take them, some columns of a token each. Where slots are sorted instead, these
are all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from .._compat import triton_call
from ..dequant_matmul.operands import load
from ..dequant_matmul.turn import THREADS, Turn
from .config import COLUMNS, WARPS

# A program is one warp: its threads need not wait for others, and find a least number in one
# instruction. Every order stays within its columns. Of many tokens alone, it has more warps.


class Order(NamedTuple):
    """Slots that share an expert, and tokens as they are read.

    Slots of an expert, in their order, are cut into rows of R, the last one as short as it must be.

    Attributes:
        experts: of each slot that is the first of a row; -1 of all others.
        slots: of each slot, itself and those behind it of its expert; S where there are no more,
            and for all of an empty slot.
        inputs: tokens in each order that is wanted.
    """

    experts: Int[Array, " S"]
    slots: Int[Array, "S R"]
    inputs: list[Float[Array, "_CM _D"]]


def ordered(
    x: Float[Array, "M D"],
    ids: Int[Array, "M A"],
    experts: int,
    rows: int,
    wanted: Sequence[tuple[Turn, int]],
) -> Order:
    """Table and inputs of a call.

    Args:
        x: tokens.
        ids: experts of slots.
        experts: E; slots with other ids are empty, and in no row.
        rows: R.
        wanted: orders of tokens, and how many columns, with zeros behind the last input.
    """
    flat, tokens = ids.reshape(-1), x.shape[0]
    # Those that read alike read the same.
    different = list(dict.fromkeys(wanted))
    turns = [turn for turn, _ in different]
    structs = [
        jax.ShapeDtypeStruct((turn.copies * tokens, columns), jnp.bfloat16)
        for turn, columns in different
    ]

    def kernel(ids_ref: Any, x_ref: Any, *outs: Any) -> None:
        program = pl.program_id(0)

        @pl.when(program < flat.size)
        def _() -> None:
            _write_row(ids_ref, program, experts, *outs[:2])

        @pl.when(program >= flat.size)
        def _() -> None:
            _write_columns(x_ref, program - flat.size, turns, outs[2:], COLUMNS)

    firsts, slots, *inputs = triton_call(
        kernel,
        num_warps=1,
        num_stages=1,
        name="expert_dispatch_order",
        grid=(flat.size + tokens * _programs(structs, COLUMNS),),
        out_shape=[
            jax.ShapeDtypeStruct(flat.shape, flat.dtype),
            jax.ShapeDtypeStruct((flat.size, rows), jnp.int32),
            *structs,
        ],
    )(flat, x)
    return Order(firsts, slots, [inputs[different.index(each)] for each in wanted])


def in_order(x: Float[Array, "M D"], turn: Turn) -> Float[Array, "M D"]:
    """Tokens alone, in bfloat16 and one order, in whose blocks D is cut.

    Alone, XLA's transposition is as fast; in a model it is joined with other work, and takes three
    times as long.
    """
    assert x.shape[1] % (THREADS * turn.width) == 0
    out = jax.ShapeDtypeStruct(x.shape, jnp.bfloat16)

    def kernel(x_ref: Any, out_ref: Any) -> None:
        _write_columns(x_ref, pl.program_id(0), [turn], [out_ref], WARPS * COLUMNS)

    return triton_call(
        kernel,
        num_warps=WARPS,
        num_stages=1,
        name="expert_dispatch_inputs",
        grid=(x.shape[0] * _programs([out], WARPS * COLUMNS),),
        out_shape=out,
    )(x)


def _write_row(ids_ref: Any, slot: Any, experts: int, experts_ref: Any, slots_ref: Any) -> None:
    """A slot's expert if it is the first of a row, and the slots of the row that it would begin.

    Args:
        ids_ref: experts of slots.
        slot: which.
        experts: see `ordered`.
        experts_ref: see `Order`.
        slots_ref: see `Order`.
    """
    count, rows = slots_ref.shape
    index = jax.lax.iota(jnp.int32, pl.next_power_of_2(count))
    inside = index < count if index.size != count else None
    mine, others = ids_ref[slot], load(ids_ref, index, mask=inside)
    # What is like it past the end is never the least.
    found = jnp.where(others == mine, index, count)
    before = jnp.sum((found < slot).astype(jnp.int32))
    filled = (mine >= 0) & (mine < experts)
    experts_ref[slot] = jnp.where(filled & (jax.lax.rem(before, rows) == 0), mine, -1)
    # Behind the last slot there is none, whatever is like this one.
    first, places = jnp.where(filled, slot, count), jax.lax.iota(jnp.int32, rows)

    def add(place: Any, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        last, row = carry
        following = jnp.min(jnp.where(found > last, found, count))
        return following, jnp.where(places == place, following, row)

    _, row = jax.lax.fori_loop(1, rows, add, (first, jnp.full((rows,), first, jnp.int32)))
    plt.store(slots_ref.at[jnp.full((rows,), slot, jnp.int32), places], row)


def _write_columns(
    x_ref: Any, index: Any, turns: Sequence[Turn], refs: Sequence[Any], columns: int
) -> None:
    """Some columns of a token in each order, of all copies.

    Args:
        x_ref: tokens.
        index: program, of those that write columns.
        turns: orders.
        refs: of each, all tokens in it.
        columns: how many.
    """
    (tokens, inputs), programs = x_ref.shape, _programs(refs, columns)
    token, first = jax.lax.div(index, programs), jax.lax.rem(index, programs) * columns
    row, place = jnp.full((columns,), token, jnp.int32), jax.lax.iota(jnp.int32, columns)

    def inside(column: Array, count: int) -> Array | None:
        return first + column < count if count < programs * columns else None

    # All before the first is written, behind which others would wait.
    found = [turn.column_of(place) for turn in turns]
    values = [
        load(x_ref, row, first + column, mask=inside(column, inputs)).astype(jnp.bfloat16)
        for column in found
    ]
    for turn, ref, column, own in zip(turns, refs, found, values, strict=True):
        mask = inside(place, ref.shape[1])
        for copy in range(turn.copies):
            part = own
            if turn.copies > 1:
                part = jnp.where(turn.copy_of(column) == copy, own, 0)
            plt.store(ref.at[copy * tokens + row, first + place], part, mask=mask)


def _programs(orders: Iterable[Any], columns: int) -> int:
    """Those that write a token in all orders, so many columns each; the widest needs most."""
    return max(pl.cdiv(order.shape[1], columns) for order in orders)
