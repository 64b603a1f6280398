"""The order of inputs in which threads that read units side by side read neighbouring bytes.

A thread takes 16 bytes of its unit at a time. In the order of the inputs these lie a unit apart,
and each thread's are a request of their own to the cache. Here, the first 16 bytes of all units
that are read at once come first, then the second ones, and so on.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .layout import UNIT
from .operands import iota

# Values of 16 bits a thread reads at once.
PIECE = 8


def abreast(x: Float[Array, "M I"], units: int) -> Float[Array, "M _I"]:
    """Rows of inputs in that order; what there is gets zeros up to whole steps.

    Args:
        x: rows.
        units: that are read at once.
    """
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % (units * UNIT))))
    pieces = x.reshape(x.shape[0], -1, units, UNIT // PIECE, PIECE)
    return pieces.transpose(0, 1, 3, 2, 4).reshape(x.shape[0], -1)


def places_of_step(step: Any, start: int, size: tuple[int, int, int]) -> Int[Array, "o u p"]:
    """Where pieces are that threads read side by side.

    They are those of `place_of_value`, written so that the compiler sees neighbours.

    Args:
        step: which units, of as many as are read at once.
        start: the first value of the piece, in each unit.
        size: outputs, units, and `PIECE`.
    """
    return (step * UNIT + start) * size[1] + iota(size, 1) * PIECE + iota(size, 2)


def place_of_value(unit: Int[Array, "*s"], value: Int[Array, "*s"], units: int) -> Int[Array, "*s"]:
    """Where a value of a unit is.

    Args:
        unit: which, from zero.
        value: of it.
        units: that are read at once.
    """
    piece, inside = value // PIECE, value % PIECE
    return unit // units * (units * UNIT) + (piece * units + unit % units) * PIECE + inside
