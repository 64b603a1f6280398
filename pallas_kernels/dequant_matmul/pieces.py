"""Matrices that share their input, as one launch.

Each has programs of its own, one matrix after the other along the first axis of the grid, and a
result of its own. So one launch may decode some and multiply others as they are.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from .._compat import triton_call
from .layout import UNIT, unit_count
from .operands import Shape
from .qtensor import QTensor


@dataclasses.dataclass(frozen=True)
class Piece:
    """One of the matrices.

    Attributes:
        shape: of its product.
        arrays: codes [O words], scale and perhaps zero; or the matrix itself.
    """

    shape: Shape
    arrays: tuple[Array, ...]

    @classmethod
    def of(cls, weight: Float[Array, "O I"] | QTensor, rows: int, dtype: DTypeLike) -> Piece:
        """The piece for so many rows of x, with results of a dtype."""
        outputs, inputs = weight.shape
        units = unit_count(inputs)
        if not isinstance(weight, QTensor):
            bits = 8 * weight.dtype.itemsize
            return cls(Shape(rows, inputs, outputs, bits, units, units, dtype), (weight,))
        group_units = weight.group_size // UNIT
        shape = Shape(rows, inputs, outputs, weight.bits, units, group_units, dtype)
        arrays = (weight.codes.reshape(outputs, -1), weight.scale)
        return cls(shape, arrays if weight.zero is None else (*arrays, weight.zero))

    @property
    def coded(self) -> bool:
        """Whether the matrix is in codes."""
        return len(self.arrays) > 1


@dataclasses.dataclass(frozen=True)
class Share:
    """A piece's part of a launch, inside the kernel.

    Attributes:
        shape: of its product.
        first: output of the program.
        refs: references to its arrays.
        out_ref: reference to its result.
        mine: whether the program is one of its.
    """

    shape: Shape
    first: Any
    refs: tuple[Any, ...]
    out_ref: Any
    mine: Any


def chosen(shares: Sequence[Share], function: Callable[[Share], Any]) -> Any:
    """What the function gives for the share that is the program's."""
    share, *others = shares
    if not others:
        return function(share)
    return jax.lax.cond(share.mine, lambda: function(share), lambda: chosen(others, function))


def launch(
    body: Callable[..., None],
    inputs: Sequence[Float[Array, "_M _I"]],
    pieces: Sequence[Piece],
    outputs: Sequence[int],
    out_shape: Sequence[jax.ShapeDtypeStruct],
    *,
    alike: Sequence[Any],
    grid: tuple[int, ...] = (),
    **options: Any,
) -> tuple[Array, ...]:
    """Results of all pieces.

    Args:
        body: of a program: (shares of pieces that are alike, one of them the program's, index of
            the first of these pieces, further program ids, references to the inputs).
        inputs: rows of x, in whatever orders.
        pieces: matrices.
        outputs: outputs of a program, of each piece.
        out_shape: of each result.
        alike: of each piece; pieces with equal ones have one body.
        grid: its further axes.
        options: of `triton_call`.
    """
    counts = [pl.cdiv(p.shape.outputs, size) for p, size in zip(pieces, outputs, strict=True)]
    starts = [0, *itertools.accumulate(counts)]
    places = [0, *itertools.accumulate(len(piece.arrays) for piece in pieces)]

    def kernel(*refs: Any) -> None:
        input_refs, refs = refs[: len(inputs)], refs[len(inputs) :]
        program, *others = (pl.program_id(axis) for axis in range(1 + len(grid)))
        groups: dict[Any, list[int]] = {}
        shares = []
        for index, piece in enumerate(pieces):
            start, end = starts[index : index + 2]
            own = refs[places[index] : places[index + 1]]
            first = (program - start) * outputs[index]
            mine = (program >= start) & (program < end)
            shares.append(Share(piece.shape, first, own, refs[places[-1] + index], mine))
            groups.setdefault(alike[index], []).append(index)
        for group in groups.values():
            members = [shares[index] for index in group]
            run = functools.partial(body, members, group[0], others, *input_refs)
            if len(groups) == 1:
                run()
            else:
                pl.when(functools.reduce(operator.or_, [share.mine for share in members]))(run)

    arrays = [*inputs, *(array for piece in pieces for array in piece.arrays)]
    call = triton_call(kernel, grid=(starts[-1], *grid), out_shape=tuple(out_shape), **options)
    return tuple(call(*arrays))
