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
from jaxtyping import Array, Bool, Float, Int

from ..dequant_matmul import raising, tile
from ..dequant_matmul.config import SomeRows
from ..dequant_matmul.layout import UNIT
from ..dequant_matmul.operands import Shape, iota, load
from ..dequant_matmul.qtensor import QTensor
from ..dequant_matmul.turn import column_of, copy_of, place_of
from .matrix import Coded, arrays_of, matrix_of


@dataclasses.dataclass(frozen=True)
class Joint:
    """A matrix, or one of a stack, and how its products are cut.

    Attributes:
        shape: sizes; rows are not looked at.
        cut: see there; `rows` is most slots of a program, R.
        arrays: of the matrix or stack, one row behind the other.
        share: most inputs of a row that one program writes.
    """

    shape: Shape
    cut: SomeRows
    arrays: list[Array]
    share: int

    @classmethod
    def of(cls, weight: QTensor, outputs: int, cut: SomeRows, share: int | None = None) -> Joint:
        """Of a matrix or a stack, for products with so many outputs.

        Args:
            weight: the matrix or stack.
            outputs: of a product.
            cut: see `Joint`.
            share: see `Joint`; None for all that are multiplied together.

        Raises:
            ValueError: sums of inputs would have too many writers.
        """
        matrix = matrix_of(weight)
        assert isinstance(matrix, Coded)
        shape = dataclasses.replace(matrix.shape, outputs=outputs)
        together = raising.units_together(shape) * UNIT
        joint = cls(shape, cut, arrays_of(weight), min(together, share or together))
        if joint.is_raised and joint.writers > raising.MOST_WRITERS:
            raise ValueError(
                f"programs that write {share} inputs each make {joint.writers} parts of a sum of "
                f"{joint.summed}; accepted are {raising.MOST_WRITERS} parts, so at least "
                f"{joint.summed // raising.MOST_WRITERS} outputs a program"
            )
        return joint

    @property
    def order(self) -> tuple[int, int]:
        """See `tile.order`."""
        return tile.order(self.shape)

    @property
    def is_raised(self) -> bool:
        """Whether codes are raised, so that inputs have sums beside them, see `raising`."""
        return raising.is_raised(self.shape.bits)

    @property
    def columns(self) -> int:
        """Columns of inputs, sums not counted."""
        step = self.cut.units * UNIT
        return pl.cdiv(self.shape.inputs, step) * step

    @property
    def together(self) -> int:
        """Inputs that are multiplied together."""
        return raising.units_together(self.shape) * UNIT

    @property
    def summed(self) -> int:
        """Inputs of a sum: of those that are multiplied together, the ones of a copy."""
        return self.together // self.order[1]

    @property
    def writers(self) -> int:
        """Parts of a sum."""
        return max(1, self.summed // self.share)

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

    def struct_of(self, count: int) -> jax.ShapeDtypeStruct:
        """What holds so many inputs of this matrix, in its order, and their sums behind them."""
        sums = self.columns // self.together * raising.COLUMNS if self.is_raised else 0
        return jax.ShapeDtypeStruct((self.order[1] * count, self.columns + sums), jnp.bfloat16)

    def products(
        self,
        matrices: Sequence[tuple[Sequence[Any], Any]],
        first: Any,
        ref: Any,
        mine: Int[Array, " R"],
        slots: int,
    ) -> list[Float[Array, "o R"]]:
        """Products with matrices of this format.

        Args:
            matrices: see `tile.products`.
            first: output.
            ref: rows of inputs as `struct_of` says, each for so many slots.
            mine: slots; those past the last are none.
            slots: see `ref`.
        """
        steps = 0, pl.cdiv(self.shape.units, self.cut.units)
        inputs = functools.partial(self._gathered, ref, mine, slots)
        sums = functools.partial(self._sums, ref, mine, slots) if self.is_raised else None
        return tile.products(self.shape, self.cut, matrices, first, steps, inputs, sums)

    def store(
        self, ref: Any, mine: Int[Array, " R"], first: Any, made: Float[Array, "o R"]
    ) -> None:
        """Write inputs of this matrix in its order, with zeros in other copies, and their sums.

        Args:
            ref: see `struct_of`.
            mine: slots; those past the last are none.
            first: input.
            made: inputs of slots.
        """
        part, copies = self.order
        slots, column = ref.shape[0] // copies, first + iota(made.shape, 0)
        slot = jnp.broadcast_to(mine[None, :], made.shape)
        mask = (slot < slots) & (column < self.shape.inputs)
        for copy in range(copies):
            own = made
            if copies > 1:
                own = jnp.where(copy_of(column, part, copies) == copy, made, 0)
            # What is masked must not be at the place of another copy.
            row = jnp.where(mask, copy * slots + slot, ref.shape[0])
            plt.store(ref.at[row, place_of(column, part)], own, mask=mask)
        if self.is_raised:
            raised = raising.raised(first + iota((made.shape[0], 1), 0), self.shape.bits)
            parts = made.shape[0] // min(made.shape[0], self.summed)
            weighted = (made.astype(jnp.float32) * raised).reshape(parts, -1, mine.shape[0])
            self.store_sums(ref, mine[None, :], first, jnp.sum(weighted, axis=1))

    def store_sums(
        self, ref: Any, slot: Int[Array, "a b"], first: Any, sums: Float[Array, "p r"]
    ) -> None:
        """Write sums, or parts of them.

        Args:
            ref: see `struct_of`.
            slot: of each sum, or to be broadcast; those past the last are none.
            first: input of the first of them.
            sums: of inputs times `raising.raised`, of neighbours along the first axis.
        """
        copies, columns = self.order[1], raising.columns_of(sums, self.writers)
        size = columns.shape
        start = first + iota(size, 0) * min(self.share, self.summed)
        slot = jnp.broadcast_to(slot[:, :, None], size)
        copy = jax.lax.rem(jax.lax.div(start, self.summed), copies)
        writer = jax.lax.rem(jax.lax.div(start, min(self.share, self.summed)), self.writers)
        place = jax.lax.div(start, self.together) * raising.COLUMNS + writer * size[2]
        mask = (slot < ref.shape[0] // copies) & (start < self.columns)
        row = copy * (ref.shape[0] // copies) + slot
        plt.store(ref.at[row, self.columns + place + iota(size, 2)], columns, mask=mask)

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
        """See `tile.Inputs`."""
        _, row, exists = self._rows(ref, mine, slots, width)
        place = unit * UNIT + iota(row.shape, 1)
        if self.columns != self.shape.inputs:
            exists = exists & (column_of(place, self.order[0]) < self.shape.inputs)
        return load(ref, row, place, mask=exists)

    def _sums(self, ref: Any, mine: Any, slots: int, index: Any) -> Float[Array, "gm c"]:
        """See `tile.Sums`."""
        copy, row, exists = self._rows(ref, mine, slots, raising.COLUMNS)
        column = iota(row.shape, 1)
        if self.columns != self.shape.inputs:
            # Of inputs that do not exist nobody writes sums.
            writer = jax.lax.div(column, raising.COLUMNS // self.writers)
            start = index * self.together + copy * self.summed + writer * self.share
            exists = exists & (start < self.shape.inputs)
        return load(ref, row, self.columns + index * raising.COLUMNS + column, mask=exists)

    def _rows(
        self, ref: Any, mine: Any, slots: int, width: int
    ) -> tuple[Int[Array, "gm i"], Int[Array, "gm i"], Bool[Array, "gm i"]]:
        """Copy and row of each slot's inputs, for so many columns, and which there are."""
        copies = self.order[1]
        rows, size = ref.shape[0] // copies, (copies * mine.shape[0], width)
        slot = jnp.broadcast_to(mine[None, :, None], (copies, mine.shape[0], width)).reshape(size)
        copy = jax.lax.div(iota(size, 0), mine.shape[0])
        return copy, copy * rows + jax.lax.div(slot, slots), slot < slots * rows


def row_of(ref: Any, index: Any) -> Int[Array, " R"]:
    """A row of a table."""
    count = ref.shape[1]
    return load(ref, jnp.full((count,), index, jnp.int32), jax.lax.iota(jnp.int32, count))
