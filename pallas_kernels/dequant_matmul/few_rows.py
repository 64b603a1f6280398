"""Up to four rows: on CUDA cores, one fused multiply-add a value and row.

Two launches. The first, a tiny one, turns x so that the same value of neighbouring units lies side
by side, times what makes a step of the value's mantissa 1. Threads of the second then hold units,
and need no other thread's until their sums are added.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, UInt

from .._compat import multiply_add, triton_call
from .config import FewRows
from .layout import CENTRES, UNIT
from .operands import Shape, iota, load, per_group, words
from .unit import mantissas, multipliers

TURNED_UNITS = 16
# Rows of what `turned` returns: after the values of a unit, where its sum starts, and x's own sum.
START, SUM = UNIT, UNIT + 1


def product(
    shape: Shape,
    x: Float[Array, "M I"],
    codes: UInt[Array, "O words"],
    scale: Float[Array, "O J"],
    zero: Float[Array, "O J"] | None,
    config: FewRows,
) -> Float[Array, "M O"]:
    """See `api.dequant_matmul`."""
    tile = config.outputs, config.units
    tiles = pl.cdiv(shape.units, config.units)
    arrays = [turned(shape, x, tiles, config.units, zero is None), codes, scale]
    arrays += [] if zero is None else [zero]

    def kernel(x_ref: Any, codes_ref: Any, scale_ref: Any, *refs: Any) -> None:
        zero_ref = None if zero is None else refs[0]
        output = pl.program_id(0) * tile[0] + iota(tile, 0)

        def add(index: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
            unit = index * tile[1] + iota(tile, 1)
            mask = shape.mask(tile, output, unit)
            here, group = pl.ds(index * tile[1], tile[1]), unit // shape.group_units
            scales = per_group(scale_ref, output, group, mask)
            zeros = None if zero_ref is None else per_group(zero_ref, output, group, mask)
            products = [
                jnp.broadcast_to(x_ref[row, START, here][None, :], tile)
                for row in range(shape.rows)
            ]
            for value, codes in enumerate(mantissas(words(shape, codes_ref, output, unit, mask))):
                products = [
                    multiply_add(codes, x_ref[row, value, here][None, :], product)
                    for row, product in enumerate(products)
                ]
            if zeros is not None:
                products = [
                    product - zeros * x_ref[row, SUM, here][None, :]
                    for row, product in enumerate(products)
                ]
            return tuple(map(lambda p, s: multiply_add(p, scales, s), products, sums))

        sums = (jnp.zeros(tile, jnp.float32),) * shape.rows
        sums = jax.lax.fori_loop(0, tiles, add, sums)
        column = pl.program_id(0) * tile[0] + jax.lax.iota(jnp.int32, tile[0])
        for row, total in enumerate(sums):
            plt.store(
                refs[-1].at[row, column],
                jnp.sum(total, axis=1).astype(shape.dtype),
                mask=column < shape.outputs if shape.outputs % tile[0] else None,
            )

    return triton_call(
        kernel,
        num_warps=config.num_warps,
        num_stages=1,
        name="dequant_matmul_few_rows",
        grid=(pl.cdiv(shape.outputs, tile[0]),),
        out_shape=jax.ShapeDtypeStruct((shape.rows, shape.outputs), shape.dtype),
    )(*arrays)


def turned(
    shape: Shape, x: Float[Array, "M I"], tiles: int, tile_units: int, centred: bool
) -> Float[Array, "M 34 units"]:
    """X by value of a unit and unit, multiplied; then where sums start, and the sum of x.

    Args:
        shape: of the call.
        x: rows.
        tiles: of units; those beyond the inputs are zero.
        tile_units: units of a tile, a power of two.
        centred: whether sums start so that the centre of the codes counts as zero, not code 0.
    """
    units = tiles * tile_units
    count = min(TURNED_UNITS, tile_units)
    tile = UNIT, count
    centre = CENTRES[shape.bits] if centred else 0.0

    def kernel(x_ref: Any, multiplier_ref: Any, out_ref: Any) -> None:
        row = pl.program_id(0)
        value, unit = iota(tile, 0), pl.program_id(1) * count + iota(tile, 1)
        column = unit * UNIT + value
        wide = load(x_ref, row, column, mask=column < shape.inputs).astype(jnp.float32)
        multiplied = wide * load(multiplier_ref, value)
        plt.store(out_ref.at[row, value, unit], multiplied)
        total, here = jnp.sum(wide, axis=0), pl.ds(pl.program_id(1) * count, count)
        out_ref[row, START, here] = -(jnp.sum(multiplied, axis=0) + centre * total)
        out_ref[row, SUM, here] = total

    return triton_call(
        kernel,
        num_warps=4,
        num_stages=1,
        name="dequant_matmul_turn",
        grid=(shape.rows, units // count),
        out_shape=jax.ShapeDtypeStruct((shape.rows, UNIT + 2, units), jnp.float32),
    )(x, jnp.asarray(multipliers(shape.bits), jnp.float32))
