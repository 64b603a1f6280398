"""Up to four rows: on CUDA cores, one fused multiply-add a value and row, in one launch.

A thread holds a unit's 32 inputs, as it reads them, and meets the same unit of several outputs with
them: reading inputs again for every output would cost more than the codes. Threads need no other
thread's values until their sums are added.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float

from .._compat import multiply_add
from ..lanes import parts
from . import uncoded
from .config import FewRows
from .layout import CENTRES, UNIT
from .norm import Norm
from .operands import Shape, iota, load, words
from .pieces import Piece, Share, chosen, launch
from .turns import products_in_turns
from .unit import multiplied, offsets

# So many inputs a thread reads at once: 16 bytes.
PIECE = 8
UNROLLED = 2


def products(
    x: Float[Array, "M I"],
    norm: Norm | None,
    pieces: Sequence[Piece],
    configs: Sequence[FewRows],
) -> tuple[Float[Array, "M _O"], ...]:
    """See `api.dequant_matmul`; warps are the same in all configurations."""

    def body(shares: Sequence[Share], index: int, _: Any, shared: Any) -> None:
        product = _product if pieces[index].coded else uncoded.few_rows
        product(shares, configs[index], norm, shared)

    shapes = [piece.shape for piece in pieces]
    return launch(
        body,
        (x,) if norm is None else (x, norm.weight[None]),
        pieces,
        [config.outputs for config in configs],
        [jax.ShapeDtypeStruct((shape.rows, shape.outputs), shape.dtype) for shape in shapes],
        alike=[
            (shape.bits, shape.group_units, *(array.dtype for array in piece.arrays), config)
            for shape, piece, config in zip(shapes, pieces, configs, strict=True)
        ],
        num_warps=configs[0].num_warps,
        num_stages=1,
        name="dequant_matmul_few_rows",
    )


def _product(
    shares: Sequence[Share], config: FewRows, norm: Norm | None, shared: Sequence[Any]
) -> None:
    """Outputs of one program.

    Args:
        shares: pieces of the same format; their arrays are codes, scales and perhaps zero points.
        config: see there.
        norm: of the rows.
        shared: rows, and the norm's weight as another row.
    """
    shape = shares[0].shape
    tile = config.outputs_at_once, config.units
    count = config.outputs // tile[0]
    steps = pl.cdiv(shape.units, config.units)
    has_zero = len(shares[0].refs) > 2

    def add(step: Any, carry: tuple[list[Array], list[Array]]) -> tuple[list[Array], list[Array]]:
        sums, squares = carry

        def read(turn: Any) -> list[Any]:
            return chosen(shares, functools.partial(_read, config, step, turn))

        def prepared() -> Callable[[Any], list[Array]]:
            nonlocal squares
            rows = [_inputs(shape, shared[0], row, tile, step) for row in range(shape.rows)]
            if norm is not None:
                squares = [_squares(*both) for both in zip(rows, squares, strict=True)]
                weight = _inputs(shape, shared[1], 0, tile, step)
                rows = [list(map(norm.weighted, values, weight)) for values in rows]
            return _products(shape.bits, has_zero, rows)

        each, program = config.outputs_a_turn * shape.rows, shares[0].first
        made = products_in_turns(config.turns, each, read, prepared, tile, program)
        return [added + product for added, product in zip(sums, made, strict=True)], squares

    zeros = jnp.zeros(tile, jnp.float32)
    carry = [zeros] * (count * shape.rows), [] if norm is None else [zeros] * shape.rows
    if steps <= UNROLLED:
        for step in range(steps):
            carry = add(step, carry)
    else:
        carry = jax.lax.fori_loop(0, steps, add, carry)
    for row in range(shape.rows):
        sums = carry[0][row :: shape.rows]
        if norm is not None:
            factor = jnp.broadcast_to(norm.factor(carry[1][row]), tile)
            sums = [added * factor for added in sums]
        chosen(shares, lambda s, row=row, sums=sums: _store(s.shape, s.out_ref, row, s.first, sums))


def _read(config: FewRows, step: Any, turn: Any, share: Share) -> list[tuple[Any, ...]]:
    """Words, scales and perhaps zero points of a tile of units of each output of a turn."""
    shape, (codes_ref, *numbers) = share.shape, share.refs
    tile = config.outputs_at_once, config.units
    unit = step * tile[1] + iota(tile, 1)
    group = unit // shape.group_units
    found = []
    for place in range(config.outputs_a_turn):
        index = turn * config.outputs_a_turn + place
        output = share.first + index * tile[0] + iota(tile, 0)
        mask = shape.mask((config.outputs, tile[1]), output, unit)
        read = [load(ref, output, group, mask=mask) for ref in numbers]
        found.append((words(shape, codes_ref, output, unit, mask), *read))
    return found


def _products(
    bits: int, has_zero: bool, rows: list[list[Array]]
) -> Callable[[Any], list[Float[Array, "o u"]]]:
    """What makes products of units that were read, of each with all rows.

    Args:
        bits: of a code.
        has_zero: whether groups have zero points.
        rows: inputs of units, by value of a unit.
    """
    centre = 0.0 if has_zero else CENTRES[bits]
    starts = [start_of(values, bits, centre) for values in rows]
    totals = [total(values) for values in rows] if has_zero else []

    def products(read: Any) -> list[Array]:
        found = []
        for codes, *numbers in read:
            scales, *zeros = (number.astype(jnp.float32) for number in numbers)
            for row, values in enumerate(rows):
                product = multiplied(codes, values, starts[row])
                if zeros:
                    product = product - zeros[0] * totals[row]
                found.append(product * scales)
        return found

    return products


def _inputs(
    shape: Shape, x_ref: Any, row: int, tile: tuple[int, int], step: Any
) -> list[Float[Array, "o u"]]:
    """The inputs of units in float32, by value of a unit; the same for all outputs.

    Args:
        shape: of the call.
        x_ref: rows.
        row: which of them.
        tile: outputs and units.
        step: which tile of units.
    """
    size = (*tile, PIECE)
    unit = step * tile[1] + jax.lax.broadcasted_iota(jnp.int32, size, 1)
    values = []
    for start in range(0, UNIT, PIECE):
        column = unit * UNIT + (start + jax.lax.broadcasted_iota(jnp.int32, size, 2))
        mask = None
        if shape.inputs % UNIT:
            mask = column < shape.inputs
        elif shape.units % tile[1]:
            mask = unit < shape.units
        piece = load(x_ref, jnp.full(size, row, jnp.int32), column, mask=mask)
        values += parts(piece)
    return [value.astype(jnp.float32) for value in values]


def start_of(values: list[Array], bits: int, centre: float) -> Array:
    """Where sums of products start: less what is on the values' way, and the centre of codes."""
    start = jnp.zeros_like(values[0])
    for value, offset in zip(values, offsets(bits), strict=True):
        start = multiply_add(value, -(offset + centre), start)
    return start


def total(values: list[Array]) -> Array:
    """Of all values of units."""
    added = values[0]
    for value in values[1:]:
        added = added + value
    return added


def _squares(values: list[Array], added: Array) -> Array:
    for value in values:
        added = multiply_add(value, value, added)
    return added


def _store(shape: Shape, out_ref: Any, row: int, first: Any, sums: list[Array]) -> None:
    """Add over units and write.

    Args:
        shape: of the call.
        out_ref: the result.
        row: of it.
        first: output of the program.
        sums: for each of as many outputs as are met at once [outputs, units].
    """
    together = sums[0][..., None] if len(sums) == 1 else stacked(sums)
    size = together.shape[0], len(sums)
    output = first + size[0] * iota(size, 1) + iota(size, 0)
    plt.store(
        out_ref.at[jnp.full(size, row, jnp.int32), output],
        jnp.sum(together, axis=1).astype(shape.dtype),
        mask=output < shape.outputs if shape.outputs % (size[0] * size[1]) else None,
    )


def stacked(arrays: list[Array]) -> Array:
    """Along a last axis, in order; as many as a power of two."""
    shape = arrays[0].shape
    while len(arrays) > 1:
        half = len(arrays) // 2
        arrays = [
            jnp.stack(pair, axis=-1) for pair in zip(arrays[:half], arrays[half:], strict=True)
        ]
    return arrays[0].reshape(*shape, -1)
