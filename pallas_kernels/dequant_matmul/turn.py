"""The order of inputs in which tensor cores multiply codes that stay where they were decoded.

An instruction of the tensor cores takes 16 inputs of 16 outputs. Four threads share an output, and
each brings two pairs of its inputs. In which order inputs are summed is free: so that each thread
brings values that it decoded itself, it takes a part of those that are summed, and instructions
take pairs of all four in turn. A part is a unit at 3 bits, else a quarter of one, which is a word
at 4 bits and two at 8.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .layout import UNIT

THREADS = 4


def part_width(bits: int) -> int:
    """Consecutive values that a thread takes."""
    return UNIT if bits == 3 else UNIT // THREADS


def turned(
    x: Float[Array, "M I"], units: int, width: int, copies: int = 1
) -> Float[Array, "_CM _I"]:
    """Rows of inputs in that order.

    Args:
        x: rows.
        units: what there is gets zeros up to a multiple of so many.
        width: of a part.
        copies: of all rows, one behind the other, each zero but for so many-th of the parts that
            are multiplied together: those of one thread, or of two that follow each other.
    """
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % (units * UNIT))))
    parts = x.reshape(1, x.shape[0], -1, THREADS, width // 4, 2, 2)
    if copies > 1:
        group = jnp.arange(THREADS, dtype=jnp.int32) // (THREADS // copies)
        mine = group[None, :] == jnp.arange(copies, dtype=jnp.int32)[:, None]
        parts = jnp.where(mine[:, None, None, :, None, None, None], parts, 0)
    return parts.transpose(0, 1, 2, 4, 5, 3, 6).reshape(copies * x.shape[0], -1)


def place_of(column: Int[Array, "*s"], width: int) -> Int[Array, "*s"]:
    """Where `turned` brings a column."""
    inside = column % (THREADS * width)
    thread, value = inside // width, inside % width
    place = value // 4 * 16 + value % 4 // 2 * 8 + thread * 2 + value % 2
    return column - inside + place


def column_of(place: Int[Array, "*s"], width: int) -> Int[Array, "*s"]:
    """Which column `turned` brings to a place."""
    # Each from the place itself, and without `//`: so the compiler sees that pairs stay together.
    block = jax.lax.div(place, THREADS * width)
    pair = jax.lax.rem(jax.lax.div(place, 2 * THREADS), width // 2)
    thread, value = jax.lax.rem(jax.lax.div(place, 2), THREADS), jax.lax.rem(place, 2)
    return (block * THREADS + thread) * width + pair * 2 + value


def copy_of(column: Int[Array, "*s"], width: int, copies: int) -> Int[Array, "*s"]:
    """In which of the copies of `turned` a column is not zero."""
    thread = jax.lax.rem(jax.lax.div(column, width), THREADS)
    return jax.lax.div(thread, THREADS // copies)
