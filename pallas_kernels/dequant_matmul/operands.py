"""What all kernels of the operation work on, as they read it."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Bool, Float, Int, UInt

from .layout import CENTRES, UNIT


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a call.

    Attributes:
        rows: M, of x.
        inputs: I.
        outputs: O.
        bits: Q.
        units: U.
        group_units: units a group.
        dtype: of the result.
    """

    rows: int
    inputs: int
    outputs: int
    bits: int
    units: int
    group_units: int
    dtype: Any

    def mask(
        self, tile: tuple[int, int], output: Int[Array, "*s"], unit: Int[Array, "*s"]
    ) -> Bool[Array, "*s"] | None:
        """Which outputs and units of a tile exist; None where all must."""
        inside = None
        if self.outputs % tile[0]:
            inside = output < self.outputs
        if self.units % tile[1]:
            exists = unit < self.units
            inside = exists if inside is None else inside & exists
        return inside


def load(ref: Any, *at: Any, mask: Any = None) -> Array:
    """Elements of an array; zero outside the mask."""
    return plt.load(ref.at[at], mask=mask, other=None if mask is None else 0)


def words(
    shape: Shape,
    codes_ref: Any,
    output: Int[Array, "o u"],
    unit: Int[Array, "o u"],
    mask: Bool[Array, "o u"] | None,
) -> list[UInt[Array, "o u"]]:
    """Words of units, one array for each bit of a code."""
    return [
        load(codes_ref, output, word * shape.units + unit, mask=mask) for word in range(shape.bits)
    ]


def per_group(
    ref: Any, output: Int[Array, "..."], group: Any, mask: Bool[Array, "..."] | None
) -> Float[Array, "..."]:
    """Scales or zero points, in float32."""
    return stored(ref, output, group, mask).astype(jnp.float32)


def stored(
    ref: Any, output: Int[Array, "..."], group: Any, mask: Bool[Array, "..."] | None
) -> Float[Array, "..."]:
    """Scales or zero points, as they are stored."""
    return load(ref, output, jnp.broadcast_to(group, output.shape), mask=mask)


def x_tile(
    shape: Shape,
    x_ref: Any,
    row: Int[Array, " m"],
    start: Any,
    width: int,
    read: Bool[Array, "m i"] | None = None,
) -> Float[Array, "m i"]:
    """Columns of x from `start` on; zero for rows and columns that do not exist.

    Args:
        shape: of the call.
        x_ref: rows.
        row: which of them.
        start: column.
        width: number of columns.
        read: which numbers are read, the others are zero; all if None.
    """
    size = (row.shape[0], width)
    rows = jnp.broadcast_to(row[:, None], size)
    column = start + iota(size, 1)
    inside = rows < shape.rows
    if shape.inputs % width:
        inside &= column < shape.inputs
    if read is not None:
        inside &= read
    return load(x_ref, rows, column, mask=inside)


def above_zero(
    shape: Shape, zero_ref: Any, output: Array, group: Any, mask: Array | None
) -> Float[Array, "..."]:
    """How far the centre of the codes is above a group's zero point."""
    return CENTRES[shape.bits] - per_group(zero_ref, output, group, mask)


def iota(tile: tuple[int, ...], axis: int) -> Int[Array, "..."]:
    """Index along one axis of a tile."""
    return jax.lax.broadcasted_iota(jnp.int32, tile, axis)


def inputs_of(units: int) -> int:
    """Values in so many units."""
    return units * UNIT
