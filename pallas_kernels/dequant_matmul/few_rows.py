"""Up to four rows: on CUDA cores, one fused multiply-add a value and row, in one launch.

A thread holds a unit's 32 inputs, as it reads them, and meets the same unit of several outputs with
them: reading inputs again for every output would cost more than the codes. Threads need no other
thread's values until their sums are added.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float

from .._compat import multiply_add
from ..lanes import parts
from . import uncoded
from .abreast import PIECE, abreast, places_of_step
from .awaited import zero_behind
from .config import FewRows
from .layout import CENTRES, UNIT
from .operands import Shape, iota, load, words
from .pieces import Piece, Share, chosen, launch
from .unit import multiplied, offsets, stacked

UNROLLED = 2


def products(
    x: Float[Array, "M I"], pieces: Sequence[Piece], configs: Sequence[FewRows]
) -> tuple[Float[Array, "M _O"], ...]:
    """See `api.dequant_matmul`; warps are the same in all configurations."""

    def body(shares: Sequence[Share], index: int, _: Any, x_ref: Any) -> None:
        product = _product if pieces[index].coded else uncoded.few_rows
        product(shares, configs[index], x_ref)

    shapes = [piece.shape for piece in pieces]
    return launch(
        body,
        (abreast(x, configs[0].units) if configs[0].abreast else x,),
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


def _product(shares: Sequence[Share], config: FewRows, x_ref: Any) -> None:
    """Outputs of one program.

    Args:
        shares: pieces of the same format; their arrays are codes, scales and perhaps zero points.
        config: see there.
        x_ref: rows.
    """
    shape = shares[0].shape
    tile = config.outputs_at_once, config.units
    steps = pl.cdiv(shape.units, config.units)
    has_zero = len(shares[0].refs) > 2

    def add(step: Any, sums: list[Array]) -> list[Array]:
        # Codes first: they come from afar.
        read = chosen(shares, functools.partial(_read, config, step))
        read_inputs = _abreast if config.abreast else _inputs
        rows = [read_inputs(shape, x_ref, row, tile, step) for row in range(shape.rows)]
        made = _products(shape.bits, has_zero, rows, read, config.awaited)
        return [added + product for added, product in zip(sums, made, strict=True)]

    sums = [jnp.zeros(tile, jnp.float32)] * (config.outputs // tile[0] * shape.rows)
    if steps <= UNROLLED:
        for step in range(steps):
            sums = add(step, sums)
    else:
        sums = jax.lax.fori_loop(0, steps, add, sums)
    for row in range(shape.rows):
        own = sums[row :: shape.rows]
        chosen(shares, lambda s, row=row, own=own: _store(s.shape, s.out_ref, row, s.first, own))


def _read(config: FewRows, step: Any, share: Share) -> list[tuple[Any, ...]]:
    """Words, scales and perhaps zero points of a tile of units of each output."""
    shape, (codes_ref, *numbers) = share.shape, share.refs
    tile = config.outputs_at_once, config.units
    unit = step * tile[1] + iota(tile, 1)
    group = unit // shape.group_units
    found = []
    for start in range(0, config.outputs, tile[0]):
        output = share.first + start + iota(tile, 0)
        mask = shape.mask((config.outputs, tile[1]), output, unit)
        read = [load(ref, output, group, mask=mask) for ref in numbers]
        found.append((words(shape, codes_ref, output, unit, mask), *read))
    return found


def _products(
    bits: int,
    has_zero: bool,
    rows: list[list[Array]],
    read: list[tuple[Any, ...]],
    awaited: bool,
) -> list[Float[Array, "o u"]]:
    """Products of units that were read, of each with all rows.

    Args:
        bits: of a code.
        has_zero: whether groups have zero points.
        rows: inputs of units, by value of a unit.
        read: by `_read`.
        awaited: see `FewRows`.
    """
    centre, zero = 0.0 if has_zero else CENTRES[bits], jnp.zeros_like(rows[0][0])
    if awaited:
        codes = [word for words, *_ in read for word in words]
        numbers = [each.astype(jnp.float32) for _, *numbers in read for each in numbers]
        zero = zero_behind([*codes, *numbers])
    starts = [start_of(values, bits, centre, zero) for values in rows]
    totals = [total(values) for values in rows] if has_zero else []
    found = []
    for codes, *numbers in read:
        scales, *zeros = (number.astype(jnp.float32) for number in numbers)
        for row, values in enumerate(rows):
            product = multiplied(codes, values, starts[row])
            if zeros:
                product = product - zeros[0] * totals[row]
            found.append(product * scales)
    return found


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


def _abreast(
    shape: Shape, x_ref: Any, row: int, tile: tuple[int, int], step: Any
) -> list[Float[Array, "o u"]]:
    """See `_inputs`; of rows in the order of `abreast`, where all units of a step exist."""
    size = (*tile, PIECE)
    values = []
    for start in range(0, UNIT, PIECE):
        column = places_of_step(step, start, size)
        values += parts(load(x_ref, jnp.full(size, row, jnp.int32), column))
    return [value.astype(jnp.float32) for value in values]


def start_of(values: list[Array], bits: int, centre: float, start: Array) -> Array:
    """Where sums of products start: less what is on the values' way, and the centre of codes.

    Args:
        values: inputs, by value of a unit.
        bits: of a code.
        centre: of codes.
        start: zero.
    """
    for value, offset in zip(values, offsets(bits), strict=True):
        start = multiply_add(value, -(offset + centre), start)
    return start


def total(values: list[Array]) -> Array:
    """Of all values of units."""
    added = values[0]
    for value in values[1:]:
        added = added + value
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
    together = along_last(sums)
    size = together.shape[0], len(sums)
    output = first + size[0] * iota(size, 1) + iota(size, 0)
    plt.store(
        out_ref.at[jnp.full(size, row, jnp.int32), output],
        jnp.sum(together, axis=1).astype(shape.dtype),
        mask=output < shape.outputs if shape.outputs % (size[0] * size[1]) else None,
    )


def along_last(arrays: list[Array]) -> Array:
    """Along a last axis, in order; as many as a power of two."""
    return stacked(arrays).reshape(*arrays[0].shape, -1)
