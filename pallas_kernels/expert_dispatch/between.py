"""What lies between the two launches of a few tokens, in the order in which codes meet it."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeGuard

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float

from ..dequant_matmul.abreast import place_of_value
from ..dequant_matmul.layout import UNIT
from .gates import columns
from .matrix import Coded, Matrix


def is_abreast(below: Matrix, dtype: Any) -> TypeGuard[Coded]:
    """Whether it is: numbers of 16 bits that codes meet."""
    return isinstance(below, Coded) and jnp.dtype(dtype).itemsize == 2


@dataclasses.dataclass(frozen=True)
class Between:
    """All slots of a token are a row, each from a whole unit on.

    Attributes:
        below: matrices that meet them.
        slots: of a token.
        at_once: units that are read at once.
    """

    below: Coded
    slots: int
    at_once: int

    def shape(self, tokens: int) -> tuple[int, int]:
        """Sizes for so many tokens."""
        units = pl.cdiv(self.slots * self.below.units, self.at_once) * self.at_once
        return tokens, units * UNIT

    def store(self, ref: Any, token: Any, slot: Any, first: Any, made: Float[Array, "o n"]) -> None:
        """Write what a program made.

        Args:
            ref: rows of tokens.
            token: which.
            slot: which of its.
            first: output of the program.
            made: see `gates.columns`.
        """
        outputs, together = made.shape
        column = columns(first, (outputs, together))
        unit = slot * self.below.units + column // UNIT
        place = place_of_value(unit, column % UNIT, self.at_once)
        row = jnp.full(made.shape, token, jnp.int32)
        plt.store(ref.at[row, place], made.astype(ref.dtype), mask=column < self.below.inputs)
