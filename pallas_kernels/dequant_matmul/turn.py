"""The order of inputs in which tensor cores multiply codes that stay where they were decoded.

An instruction of the tensor cores takes 16 inputs of 16 outputs. Four threads share an output, and
each brings two pairs of its inputs. In which order inputs are summed is free: so that each thread
brings values that it decoded itself, it takes a part of those that are summed, and instructions
take pairs of all four in turn. A part is a unit at 3 bits, else a quarter of one, which is a word
at 4 bits and two at 8.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from .layout import UNIT

THREADS = 4


def part_width(bits: int) -> int:
    """Consecutive values that a thread takes."""
    return UNIT if bits == 3 else UNIT // THREADS


def turned(x: Float[Array, "M I"], units: int, width: int) -> Float[Array, "M _I"]:
    """Rows of inputs in that order.

    Args:
        x: rows.
        units: what there is gets zeros up to a multiple of so many.
        width: of a part.
    """
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % (units * UNIT))))
    parts = x.reshape(x.shape[0], -1, THREADS, width // 4, 2, 2)
    return parts.transpose(0, 1, 3, 4, 2, 5).reshape(x.shape)
