"""A stack of experts' matrices as kernels of many tokens read it: in codes, or in bfloat16.

All matrices lie below each other. A tile is some rows of one of them, and multiplies columns of
tokens from the left.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt

from .._compat import dot
from ..dequant_matmul.layout import CENTRES, UNIT
from ..dequant_matmul.operands import Shape, iota, load, per_group, stored, words
from ..dequant_matmul.qtensor import QTensor
from ..dequant_matmul.unit import centred, numbers


@dataclasses.dataclass(frozen=True)
class Block:
    """Where a tile of weights is.

    Attributes:
        row: of the stack, where the outputs begin.
        output: outputs of the tile, from there on.
        outputs: how many there are.
        units: of 32 inputs that are multiplied at once.
        turns: how many times so many are read at once.
        index: which tile of units.
    """

    row: Any
    output: Int[Array, " o"]
    outputs: int
    units: int
    turns: int
    index: Any


@dataclasses.dataclass(frozen=True)
class Plain:
    """Matrices in bfloat16.

    Attributes:
        inputs: I.
    """

    inputs: int

    def add(
        self,
        refs: tuple[Any, ...],
        at: Block,
        xs: list[Float[Array, "m i"]],
        total: Float[Array, "o m"],
    ) -> Float[Array, "o m"]:
        """Total + the tile times x, which is zero behind the last input.

        Args:
            refs: arrays of the stack.
            at: where the tile is.
            xs: columns of the inputs, for each turn.
            total: what it is added to.
        """
        size = at.output.shape[0], at.units * UNIT
        for turn, x in enumerate(xs):
            output = at.output[:, None] + iota(size, 1) * 0
            column = (at.index * at.turns + turn) * size[1] + iota(size, 1)
            mask = _mask(self.inputs, at.turns * size[1], at, output, column)
            weights = load(refs[0], at.row + output, column, mask=mask)
            total = total + dot(weights, x.T)
        return total


@dataclasses.dataclass(frozen=True)
class Coded:
    """Matrices in codes.

    Attributes:
        shape: sizes of one; the rows of inputs are not looked at.
    """

    shape: Shape

    @property
    def inputs(self) -> int:
        """I."""
        return self.shape.inputs

    def of_all(self, experts: int) -> Shape:
        """Sizes of all matrices as one."""
        return dataclasses.replace(self.shape, outputs=experts * self.shape.outputs)

    def add(
        self,
        refs: tuple[Any, ...],
        at: Block,
        xs: list[Float[Array, "m i"]],
        total: Float[Array, "o m"],
    ) -> Float[Array, "o m"]:
        """See `Plain.add`."""
        size = at.output.shape[0], at.turns * at.units
        output, unit = at.output[:, None] + iota(size, 1) * 0, at.index * size[1] + iota(size, 1)
        mask = _mask(self.shape.units, size[1], at, output, unit)
        read = words(self.shape, refs[0], at.row + output, unit, mask)
        parts = [jax.lax.split(word, (at.units,) * at.turns, axis=1) for word in read]
        for turn, (x, *codes) in enumerate(zip(xs, *parts, strict=True)):
            total = self._turn(refs, at, at.index * at.turns + turn, codes, x, total)
        return total

    def _turn(
        self,
        refs: tuple[Any, ...],
        at: Block,
        index: Any,
        codes: list[UInt[Array, "o u"]],
        x: Float[Array, "m i"],
        total: Float[Array, "o m"],
    ) -> Float[Array, "o m"]:
        """Total + what is multiplied at once.

        Args:
            refs: see `add`.
            at: see `add`.
            index: which `at.units` units.
            codes: words of them.
            x: columns of the inputs.
            total: see `add`.
        """
        size = at.output.shape[0], at.units
        if at.turns > 1 or at.units > self.shape.group_units:
            output = at.output[:, None] + iota(size, 1) * 0
            unit = index * at.units + iota(size, 1)
            mask = _mask(self.shape.units, at.turns * at.units, at, output, unit)
            group = unit // self.shape.group_units
            scales, *zeros = (stored(ref, at.row + output, group, mask) for ref in refs[1:])
            offset = None
            if zeros:
                above = CENTRES[self.shape.bits] - zeros[0].astype(jnp.float32)
                offset = above * scales.astype(jnp.float32)
            return total + dot(numbers(codes, scales, offset), x.T)
        products = dot(centred(codes), x.T)
        group = index * at.units // self.shape.group_units
        inside = at.output < at.outputs if at.outputs % size[0] else None
        scales, *zeros = (per_group(ref, at.row + at.output, group, inside) for ref in refs[1:])
        if zeros:
            sums = jnp.sum(x.astype(jnp.float32), axis=1)
            above = CENTRES[self.shape.bits] - zeros[0]
            products = products + above[:, None] * sums[None, :]
        return total + products * scales[:, None]


Stack = Plain | Coded


def stack_of(weight: Float[Array, "E O I"] | QTensor) -> tuple[Stack, list[Array]]:
    """How a stack is read, and the arrays that it is."""
    experts, outputs, inputs = weight.shape
    if not isinstance(weight, QTensor):
        return Plain(inputs), [weight.reshape(experts * outputs, inputs)]
    leaves = [weight.codes, weight.scale] + ([] if weight.zero is None else [weight.zero])
    units = weight.codes.shape[-1]
    shape = Shape(0, inputs, outputs, weight.bits, units, weight.group_size // UNIT, None)
    return Coded(shape), [leaf.reshape(experts * outputs, -1) for leaf in leaves]


def _mask(count: int, read: int, at: Block, output: Array, index: Array) -> Array | None:
    """Which outputs and inputs, or units, of a tile exist; None where all must.

    Args:
        count: of inputs, or units.
        read: how many of them are read at once.
        at: where the tile is.
        output: outputs.
        index: inputs, or units.
    """
    inside = None
    if at.outputs % at.output.shape[0]:
        inside = output < at.outputs
    if count % read:
        exists = index < count
        inside = exists if inside is None else inside & exists
    return inside
