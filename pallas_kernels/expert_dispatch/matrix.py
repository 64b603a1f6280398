"""Matrices as the kernels of a few tokens read them: in codes, or as numbers.

A thread reads a unit of a row, meets it with the same unit of inputs, and so on with further rows.
A unit is 32 codes, or 16 bytes of numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .._compat import multiply_add
from ..dequant_matmul.abreast import places_of_step
from ..dequant_matmul.awaited import zero_behind
from ..dequant_matmul.few_rows import start_of, total
from ..dequant_matmul.layout import CENTRES, UNIT, unit_count
from ..dequant_matmul.operands import Shape, load, per_group, words
from ..dequant_matmul.qtensor import QTensor
from ..dequant_matmul.unit import multiplied
from ..lanes import parts

BYTES_AT_ONCE = 16
UNROLLED = 1


@dataclasses.dataclass(frozen=True)
class Units:
    """Which units the threads of a program read in each step.

    Attributes:
        tile: outputs and units of a step.
        slots: rows of inputs, one behind the other.
        units: of each.
        abreast: whether inputs are in the order that `abreast` tells of, all slots in one row.
    """

    tile: tuple[int, int]
    slots: int
    units: int
    abreast: bool = False

    @property
    def steps(self) -> int:
        """Steps to all units of all slots."""
        return -(-self.slots * self.units // self.tile[1])

    def at(self, step: Any, size: tuple[int, ...]) -> tuple[Array, Array, Array | None]:
        """Slot and unit of each element, whose second axis is the tile's, and which exist."""
        index = step * self.tile[1] + jax.lax.broadcasted_iota(jnp.int32, size, 1)
        count = self.slots * self.units
        exists = index < count if count % self.tile[1] else None
        if self.slots == 1:
            return jnp.zeros_like(index), index, exists
        slot = jax.lax.div(index, self.units)
        return slot, jax.lax.rem(index, self.units), exists

    def over_steps(
        self, add: Callable[[Any, list[Array]], list[Array]], count: int
    ) -> list[Float[Array, "o u"]]:
        """So many sums over all steps.

        Args:
            add: (step, sums so far) -> sums.
            count: of sums.
        """
        sums = [jnp.zeros(self.tile, jnp.float32)] * count
        if self.steps > UNROLLED:
            return jax.lax.fori_loop(0, self.steps, add, sums)
        for step in range(self.steps):
            sums = add(step, sums)
        return sums


@dataclasses.dataclass(frozen=True)
class Coded:
    """Rows of codes.

    Attributes:
        shape: sizes; the rows of inputs are not looked at.
        zero: whether groups have zero points.
    """

    shape: Shape
    zero: bool

    width = UNIT

    @property
    def inputs(self) -> int:
        """Numbers a row."""
        return self.shape.inputs

    @property
    def units(self) -> int:
        """Units a row."""
        return self.shape.units

    @property
    def count(self) -> int:
        """Arrays that the matrix is."""
        return 3 if self.zero else 2

    def read(
        self, refs: tuple[Any, ...], row: Int[Array, "o u"], unit: Int[Array, "o u"], mask: Any
    ) -> tuple[Any, ...]:
        """What is known of units of rows."""
        group = unit // self.shape.group_units
        numbers = [per_group(ref, row, group, mask) for ref in refs[1:]]
        return (words(self.shape, refs[0], row, unit, mask), *numbers)

    def prepared(
        self, values: list[Float[Array, "o u"]], awaited: Sequence[Any] = ()
    ) -> tuple[Any, ...]:
        """Inputs of units, and what all rows need of them.

        Args:
            values: inputs.
            awaited: what `read` has read that no product may begin without.
        """
        centre, zero = 0.0 if self.zero else CENTRES[self.shape.bits], jnp.zeros_like(values[0])
        if awaited:
            zero = zero_behind([each for words, *more in awaited for each in (*words, *more)])
        return (
            values,
            start_of(values, self.shape.bits, centre, zero),
            total(values) if self.zero else None,
        )

    def product(
        self,
        read: Any,
        prepared: Any,
        strength: Float[Array, "o u"] | None = None,
        used: Bool[Array, "o u"] | None = None,
    ) -> Float[Array, "o u"]:
        """Products of units of rows with their inputs, times the strength; zero where not used.

        Args:
            read: by `read`.
            prepared: by `prepared`.
            strength: of units.
            used: which count.
        """
        codes, scales, *zeros = read
        values, start, all_values = prepared
        product = multiplied(codes, values, start)
        if zeros:
            product = product - zeros[0] * all_values
        product = product * (scales if strength is None else scales * strength)
        return product if used is None else jnp.where(used, product, 0.0)


@dataclasses.dataclass(frozen=True)
class Plain:
    """Rows of numbers.

    Attributes:
        inputs: numbers a row.
        width: numbers a unit.
    """

    inputs: int
    width: int

    count = 1

    @property
    def units(self) -> int:
        """Units a row."""
        return -(-self.inputs // self.width)

    def read(
        self, refs: tuple[Any, ...], row: Int[Array, "o u"], unit: Int[Array, "o u"], mask: Any
    ) -> list[Float[Array, "o u"]]:
        """The numbers of units of rows."""
        size = (*row.shape, self.width)
        index = jax.lax.broadcasted_iota(jnp.int32, size, 2)
        column = jnp.broadcast_to(unit[..., None] * self.width, size) + index
        if mask is not None:
            mask = jnp.broadcast_to(mask[..., None], size)
        if self.inputs % self.width:
            inside = column < self.inputs
            mask = inside if mask is None else mask & inside
        rows = jnp.broadcast_to(row[..., None], size)
        return [part.astype(jnp.float32) for part in parts(load(refs[0], rows, column, mask=mask))]

    def prepared(
        self, values: list[Float[Array, "o u"]], awaited: Sequence[Any] = ()
    ) -> list[Float[Array, "o u"]]:
        """Inputs of units; for numbers there is nothing to await."""
        return values

    def product(
        self,
        read: Any,
        prepared: Any,
        strength: Float[Array, "o u"] | None = None,
        used: Bool[Array, "o u"] | None = None,
    ) -> Float[Array, "o u"]:
        """See `Coded.product`."""
        product = read[0] * prepared[0]
        for number, value in zip(read[1:], prepared[1:], strict=True):
            product = multiply_add(number, value, product)
        if strength is not None:
            product = product * strength
        return product if used is None else jnp.where(used, product, 0.0)


Matrix = Coded | Plain


def all_of(tile: tuple[int, int], *masks: Any) -> Bool[Array, "o u"] | None:
    """Where all of them are; None if there are none."""
    result = None
    for mask in masks:
        if mask is not None:
            mask = jnp.broadcast_to(mask, tile)
            result = mask if result is None else result & mask
    return result


def matrix_of(weight: Any) -> Matrix:
    """How a matrix, or each of a stack, is read."""
    inputs = weight.shape[-1]
    if not isinstance(weight, QTensor):
        return Plain(inputs, BYTES_AT_ONCE // weight.dtype.itemsize)
    outputs, group_units = weight.shape[-2], weight.group_size // UNIT
    sizes = weight.bits, unit_count(inputs), group_units
    return Coded(Shape(0, inputs, outputs, *sizes, jnp.float32), weight.zero is not None)


def arrays_of(weight: Any) -> list[Array]:
    """The arrays of a matrix or a stack, one row behind the other."""
    if not isinstance(weight, QTensor):
        return [weight.reshape(-1, weight.shape[-1])]
    outputs = weight.scale.size // weight.scale.shape[-1]
    found = [weight.codes, weight.scale, weight.zero]
    return [array.reshape(outputs, -1) for array in found if array is not None]


def inputs_of_units(
    ref: Any, first_row: Any, units: Units, step: Any, matrix: Matrix
) -> list[Float[Array, "o u"]]:
    """The inputs of a step's units, in float32, by value of a unit.

    Args:
        ref: rows of inputs.
        first_row: the first slot's, or that of all of them.
        units: see there.
        step: which.
        matrix: that meets them.
    """
    piece = min(BYTES_AT_ONCE // ref.dtype.itemsize, matrix.width)
    size = (*units.tile, piece)
    slot, unit, exists = units.at(step, size)
    values = []
    for start in range(0, matrix.width, piece):
        index = jax.lax.broadcasted_iota(jnp.int32, size, 2)
        column, mask = unit * matrix.width + (start + index), exists
        if matrix.inputs % matrix.width:
            inside = column < matrix.inputs
            mask = inside if mask is None else mask & inside
        row = first_row + slot
        if units.abreast:
            row, column = jnp.full(size, first_row, jnp.int32), places_of_step(step, start, size)
        values += parts(load(ref, row, column, mask=mask))
    return [value.astype(jnp.float32) for value in values]
