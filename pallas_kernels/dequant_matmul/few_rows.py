"""Up to four rows: on CUDA cores, one fused multiply-add a value and row, in one launch.

A thread holds a unit's 32 inputs, as it reads them, and meets the same unit of several outputs with
them: reading inputs again for every output would cost more than the codes. Threads need no other
thread's values until their sums are added.
"""

from __future__ import annotations

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
from .operands import Shape, iota, load, per_group, words
from .pieces import Piece, launch
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

    def body(index: int, first: Any, _: Any, shared: Any, refs: Any, out_ref: Any) -> None:
        piece, config = pieces[index], configs[index]
        product = _product if piece.coded else uncoded.few_rows
        product(piece.shape, config, norm, first, shared, refs, out_ref)

    shapes = [piece.shape for piece in pieces]
    return launch(
        body,
        (x,) if norm is None else (x, norm.weight[None]),
        pieces,
        [config.outputs for config in configs],
        [jax.ShapeDtypeStruct((shape.rows, shape.outputs), shape.dtype) for shape in shapes],
        num_warps=configs[0].num_warps,
        num_stages=1,
        name="dequant_matmul_few_rows",
    )


def _product(
    shape: Shape,
    config: FewRows,
    norm: Norm | None,
    first: Any,
    shared: Sequence[Any],
    refs: Sequence[Any],
    out_ref: Any,
) -> None:
    """Outputs of one program.

    Args:
        shape: of the piece.
        config: see there.
        norm: of the rows.
        first: output of the program.
        shared: rows, and the norm's weight as another row.
        refs: codes, scales and perhaps zero points.
        out_ref: the result.
    """
    tile = config.outputs_at_once, config.units
    count = config.outputs // tile[0]
    steps = pl.cdiv(shape.units, config.units)
    codes_ref, *numbers = refs
    has_zero = len(numbers) > 1
    each = count // config.turns

    def add(step: Any, carry: tuple[list[Array], list[Array]]) -> tuple[list[Array], list[Array]]:
        sums, squares = carry
        unit = step * tile[1] + iota(tile, 1)
        group = unit // shape.group_units

        def read(turn: Any) -> list[Any]:
            found = []
            for place in range(each):
                output = first + (turn * each + place) * tile[0] + iota(tile, 0)
                mask = shape.mask((config.outputs, tile[1]), output, unit)
                scales = [per_group(ref, output, group, mask) for ref in numbers]
                found.append((words(shape, codes_ref, output, unit, mask), *scales))
            return found

        def prepared() -> Callable[[list[Any]], list[Array]]:
            nonlocal squares
            rows = [_inputs(shape, shared[0], row, tile, step) for row in range(shape.rows)]
            if norm is not None:
                squares = [_squares(*both) for both in zip(rows, squares, strict=True)]
                weight = _inputs(shape, shared[1], 0, tile, step)
                rows = [list(map(norm.weighted, values, weight)) for values in rows]
            return _products(shape.bits, has_zero, rows)

        made = products_in_turns(config.turns, each * shape.rows, read, prepared, tile, first)
        return [total + product for total, product in zip(sums, made, strict=True)], squares

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
            sums = [each * factor for each in sums]
        _store(shape, out_ref, row, first, sums)


def _products(
    bits: int, has_zero: bool, rows: list[list[Array]]
) -> Callable[[list[Any]], list[Float[Array, "o u"]]]:
    """What makes products of units that were read, of each with all rows.

    Args:
        bits: of a code.
        has_zero: whether groups have zero points.
        rows: inputs of units, by value of a unit.
    """
    centre = 0.0 if has_zero else CENTRES[bits]
    starts = [start_of(values, bits, centre) for values in rows]
    totals = [total(values) for values in rows] if has_zero else []

    def products(read: list[Any]) -> list[Array]:
        found = []
        for codes, scales, *zeros in read:
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
    """Their sum."""
    result = values[0]
    for value in values[1:]:
        result = result + value
    return result


def _squares(values: list[Array], total: Array) -> Array:
    for value in values:
        total = multiply_add(value, value, total)
    return total


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
