"""A matrix in codes whose tiles meet the inputs of several slots, or of several tokens."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from ..dequant_matmul import tile
from ..dequant_matmul.config import SomeRows
from ..dequant_matmul.layout import UNIT
from ..dequant_matmul.operands import Shape, iota, load
from ..dequant_matmul.qtensor import QTensor
from ..dequant_matmul.turn import Turn
from .matrix import Coded, arrays_of, matrix_of


@dataclasses.dataclass(frozen=True)
class Joint:
    """A matrix, or one of a stack, and how its products are cut.

    Attributes:
        shape: sizes; rows are not looked at.
        cut: see there; `rows` is most slots of a program, R.
        arrays: of the matrix or stack, one row behind the other.
    """

    shape: Shape
    cut: SomeRows
    arrays: list[Array]

    @classmethod
    def of(cls, weight: QTensor, outputs: int, cut: SomeRows) -> Joint:
        """Of a matrix or a stack, for products with so many outputs."""
        matrix = matrix_of(weight)
        assert isinstance(matrix, Coded)
        return cls(dataclasses.replace(matrix.shape, outputs=outputs), cut, arrays_of(weight))

    @property
    def turn(self) -> Turn:
        """The order in which it meets inputs."""
        return tile.turn(self.shape)

    @property
    def tiles(self) -> int:
        """Programs to all outputs."""
        return pl.cdiv(self.shape.outputs, self.cut.outputs)

    def place(self, program: Any) -> tuple[Any, Any]:
        """Which row, and the first output."""
        row, index = jax.lax.div(program, self.tiles), jax.lax.rem(program, self.tiles)
        return row, index * self.cut.outputs

    def rows_of(self, tile: Any) -> Int[Array, " R"]:
        """Numbers of consecutive rows, tile by tile; the last ones may be past the end."""
        return tile * self.cut.rows + jax.lax.iota(jnp.int32, self.cut.rows)

    @property
    def columns(self) -> int:
        """Inputs of a row, with zeros up to a multiple of an iteration's."""
        width = self.cut.units * UNIT
        return pl.cdiv(self.shape.inputs, width) * width

    def struct_of(self, count: int) -> jax.ShapeDtypeStruct:
        """What holds so many rows of inputs of this matrix, in its order."""
        return jax.ShapeDtypeStruct((self.turn.copies * count, self.columns), jnp.bfloat16)

    def inputs(self, ref: Any, mine: Int[Array, " R"], slots: int) -> tile.Inputs:
        """How inputs of slots are read.

        Args:
            ref: rows of inputs in this matrix's order, each for so many slots.
            mine: slots; those past the last are none.
            slots: see `ref`.
        """
        return functools.partial(self._gathered, ref, mine, slots)

    def products(
        self, matrices: Sequence[tuple[Sequence[Any], Any]], first: Any, inputs: tile.Inputs
    ) -> list[Float[Array, "o R"]]:
        """Products with matrices of this format.

        Args:
            matrices: see `tile.products`.
            first: output.
            inputs: see there.
        """
        steps = 0, pl.cdiv(self.shape.units, self.cut.units)
        return tile.products(self.shape, self.cut, matrices, first, steps, inputs)

    def store(
        self, ref: Any, mine: Int[Array, " R"], first: Any, made: Float[Array, "o R"]
    ) -> None:
        """Write inputs of this matrix in its order, with zeros in other copies.

        Args:
            ref: see `struct_of`.
            mine: slots; those past the last are none.
            first: input.
            made: inputs of slots.
        """
        turn, copies = self.turn, self.turn.copies
        slots, column = ref.shape[0] // copies, first + iota(made.shape, 0)
        slot = jnp.broadcast_to(mine[None, :], made.shape)
        mask = (slot < slots) & (column < self.shape.inputs)
        for copy in range(copies):
            own = made
            if copies > 1:
                own = jnp.where(turn.copy_of(column) == copy, made, 0)
            # What is masked must not be at the place of another copy.
            row = jnp.where(mask, copy * slots + slot, ref.shape[0])
            plt.store(ref.at[row, turn.place_of(column)], own, mask=mask)

    def store_plainly(
        self, ref: Any, mine: Int[Array, " R"], first: Any, y: Float[Array, "o R"]
    ) -> None:
        """Write outputs.

        Args:
            ref: rows of slots.
            mine: slots; those past the last are none.
            first: output.
            y: outputs of slots.
        """
        column, slot = first + iota(y.shape, 0), jnp.broadcast_to(mine[None, :], y.shape)
        mask = (slot < ref.shape[0]) & (column < self.shape.outputs)
        plt.store(ref.at[slot, column], y, mask=mask)

    def of_rows(self, ref: Any, mine: Int[Array, " R"]) -> Float[Array, "o R"]:
        """One number a slot, for all outputs of a program."""
        size = self.cut.outputs, self.cut.rows
        slot = jnp.broadcast_to(mine[None, :], size)
        return load(ref, slot, jnp.zeros_like(slot), mask=slot < ref.shape[0])

    def _gathered(
        self, ref: Any, mine: Any, slots: int, unit: Any, width: int
    ) -> Float[Array, "gm i"]:
        turn, copies = self.turn, self.turn.copies
        rows, size = ref.shape[0] // copies, (copies * mine.shape[0], width)
        slot = jnp.broadcast_to(mine[None, :, None], (copies, mine.shape[0], width)).reshape(size)
        place = unit * UNIT + iota(size, 1)
        mask = slot < slots * rows
        if ref.shape[1] != self.shape.inputs:
            mask = mask & (turn.column_of(place) < self.shape.inputs)
        copy = jax.lax.div(iota(size, 0), mine.shape[0])
        return load(ref, copy * rows + jax.lax.div(slot, slots), place, mask=mask)


def row_of(ref: Any, index: Any) -> Int[Array, " R"]:
    """A row of a table."""
    count = ref.shape[1]
    return load(ref, jnp.full((count,), index, jnp.int32), jax.lax.iota(jnp.int32, count))
