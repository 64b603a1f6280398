"""What comes before products of tokens that share experts, in one launch of short programs.

Some make a table of which slots share an expert, a slot each. Others bring tokens into the orders
in which tensor cores take them, some columns of a token each, or sum them, see
`dequant_matmul.raising`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from .._compat import triton_call
from ..dequant_matmul import raising
from ..dequant_matmul.operands import iota, load
from ..dequant_matmul.turn import column_of, copy_of
from .joint import Joint

# A program is one warp: its threads need not wait for others, and find a least number in one
# instruction. Columns are eight a thread, 16 bytes of bfloat16; every order stays within them.
COLUMNS = 256
# Sums of a program, each of all inputs that are multiplied together.
SUMS = 8


class Order(NamedTuple):
    """Slots that share an expert, and tokens as they are read.

    Slots of an expert, in their order, are cut into rows of R, the last one as short as it must be.

    Attributes:
        experts: of each slot that is the first of a row; -1 of all others.
        slots: of each slot, itself and those behind it of its expert; S where there are no more,
            and for all of an empty slot.
        inputs: for each reader, tokens in its order; see `Joint.struct_of`.
    """

    experts: Int[Array, " S"]
    slots: Int[Array, "S R"]
    inputs: list[Float[Array, "_CM _D"]]


def ordered(
    x: Float[Array, "M D"], ids: Int[Array, "M A"], experts: int, readers: Sequence[Joint]
) -> Order:
    """Table and inputs of a call.

    Args:
        x: tokens.
        ids: experts of slots.
        experts: E; slots with other ids are empty, and in no row.
        readers: what reads tokens; the first one is the routed experts', whose `cut.rows` is R.
    """
    flat, (tokens, _) = ids.reshape(-1), x.shape
    # Those that read alike read the same.
    orders = [(r.order, r.struct_of(tokens), r.is_raised and r.shape.bits) for r in readers]
    different = dict(zip(orders, readers, strict=True))
    sums = [place for place, reader in enumerate(different.values()) if reader.is_raised]
    own = list(different.values())
    counts = [
        flat.size,
        tokens * _programs(own),
        *(tokens * _programs_of_sums(own[i]) for i in sums),
    ]
    ends = list(itertools.accumulate(counts))

    def kernel(ids_ref: Any, x_ref: Any, *outs: Any) -> None:
        program = pl.program_id(0)
        kinds: list[Callable[[Any], None]] = [
            lambda slot: _write_row(ids_ref, slot, experts, *outs[:2]),
            lambda index: _write_columns(x_ref, index, own, outs[2:]),
            *(functools.partial(_write_sums, x_ref, own[i], outs[2 + i]) for i in sums),
        ]
        for write, count, end in zip(kinds, counts, ends, strict=True):
            mine = program < end if end == count else (program >= end - count) & (program < end)
            pl.when(mine)(functools.partial(write, program - (end - count)))

    firsts, slots, *inputs = triton_call(
        kernel,
        num_warps=1,
        num_stages=1,
        name="expert_dispatch_order",
        grid=(ends[-1],),
        out_shape=[
            jax.ShapeDtypeStruct(flat.shape, flat.dtype),
            jax.ShapeDtypeStruct((flat.size, readers[0].cut.rows), jnp.int32),
            *(struct for _, struct, _ in different),
        ],
    )(flat, x)
    places = list(different)
    return Order(firsts, slots, [inputs[places.index(order)] for order in orders])


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
    alike = others == mine if inside is None else (others == mine) & inside
    found = jnp.where(alike, index, count)
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


def _write_columns(x_ref: Any, index: Any, readers: Sequence[Joint], refs: Sequence[Any]) -> None:
    """Some columns of a token in each order, of all copies.

    Args:
        x_ref: tokens.
        index: program, of those that write columns.
        readers: whose orders these are.
        refs: of each, all tokens in it.
    """
    (tokens, inputs), programs = x_ref.shape, _programs(readers)
    token, first = jax.lax.div(index, programs), jax.lax.rem(index, programs) * COLUMNS
    row, place = jnp.full((COLUMNS,), token, jnp.int32), jax.lax.iota(jnp.int32, COLUMNS)

    def inside(column: Array, count: int) -> Array | None:
        return first + column < count if count < programs * COLUMNS else None

    # All before the first is written, behind which others would wait.
    columns = [column_of(place, reader.order[0]) for reader in readers]
    values = [
        load(x_ref, row, first + column, mask=inside(column, inputs)).astype(jnp.bfloat16)
        for column in columns
    ]
    for reader, ref, column, own in zip(readers, refs, columns, values, strict=True):
        mask, (width, copies) = inside(place, reader.columns), reader.order
        for copy in range(copies):
            part = own
            if copies > 1:
                part = jnp.where(copy_of(column, width, copies) == copy, own, 0)
            plt.store(ref.at[copy * tokens + row, first + place], part, mask=mask)


def _write_sums(x_ref: Any, reader: Joint, ref: Any, index: Any) -> None:
    """Some sums of a token's inputs.

    Args:
        x_ref: tokens.
        reader: whose sums.
        ref: all tokens in its order.
        index: program, of those that write these sums.
    """
    programs, copies = _programs_of_sums(reader), reader.order[1]
    token = jax.lax.div(index, programs)
    first = jax.lax.rem(index, programs) * SUMS * reader.together
    size = SUMS * copies, reader.summed
    column = first + iota(size, 0) * reader.summed + iota(size, 1)
    mask = None
    if x_ref.shape[1] % (SUMS * reader.together):
        mask = column < x_ref.shape[1]
    x = load(x_ref, jnp.full(size, token, jnp.int32), column, mask=mask).astype(jnp.bfloat16)
    raised = raising.raised(iota((1, reader.summed), 1), reader.shape.bits)
    sums = jnp.sum(x.astype(jnp.float32) * raised, axis=1, keepdims=True)
    reader.store_sums(ref, jnp.full((1, 1), token, jnp.int32), first, sums)


def _programs(readers: Sequence[Joint]) -> int:
    """Those that write the columns of a token in all orders, of which the widest needs most."""
    return max(pl.cdiv(reader.columns, COLUMNS) for reader in readers)


def _programs_of_sums(reader: Joint) -> int:
    """Those that write the sums of a token."""
    return pl.cdiv(reader.columns, SUMS * reader.together)
