"""The order of inputs in which tensor cores multiply codes that stay where they were decoded.

An instruction of the tensor cores takes 16 inputs of 16 outputs. Four threads share an output, and
each brings two pairs of its inputs. In which order inputs are summed is free: so that each thread
brings values that it decoded itself, it takes a part of those that are summed, and instructions
take pairs of all four in turn. A part is a unit at 3 bits, else a quarter of one, which is a word
at 4 bits and two at 8.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .layout import UNIT

THREADS = 4


@dataclasses.dataclass(frozen=True)
class Turn:
    """An order.

    Attributes:
        width: consecutive inputs that a thread takes, its part.
        copies: of all rows, one behind the other, each zero but for so many-th of the parts that
            are multiplied together: those of one thread, or of two that follow each other.
        run: inputs of a part that stay side by side: a pair, as an instruction takes them, or more
            where threads read them at once.
    """

    width: int
    copies: int = 1
    run: int = 2

    def turned(self, x: Float[Array, "M I"], units: int) -> Float[Array, "_CM _I"]:
        """Rows of inputs in this order.

        Args:
            x: rows.
            units: what there is gets zeros up to a multiple of so many.
        """
        x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % (units * UNIT))))
        parts = x.reshape(1, x.shape[0], -1, THREADS, self.width // self.run, self.run)
        if self.copies > 1:
            group = jnp.arange(THREADS, dtype=jnp.int32) // (THREADS // self.copies)
            mine = group[None, :] == jnp.arange(self.copies, dtype=jnp.int32)[:, None]
            parts = jnp.where(mine[:, None, None, :, None, None], parts, 0)
        return parts.transpose(0, 1, 2, 4, 3, 5).reshape(self.copies * x.shape[0], -1)

    def place_of(self, column: Int[Array, "*s"]) -> Int[Array, "*s"]:
        """Where `turned` brings a column."""
        inside = column % (THREADS * self.width)
        thread, value = inside // self.width, inside % self.width
        run, rest = value // self.run, value % self.run
        return column - inside + (run * THREADS + thread) * self.run + rest

    def column_of(self, place: Int[Array, "*s"]) -> Int[Array, "*s"]:
        """Which column `turned` brings to a place."""
        # Each from the place itself, and without `//`: the compiler sees that runs stay together.
        div, rem = jax.lax.div, jax.lax.rem
        block = div(place, THREADS * self.width)
        run = rem(div(place, self.run * THREADS), self.width // self.run)
        thread, value = rem(div(place, self.run), THREADS), rem(place, self.run)
        return (block * THREADS + thread) * self.width + run * self.run + value

    def copy_of(self, column: Int[Array, "*s"]) -> Int[Array, "*s"]:
        """In which of the copies of `turned` a column is not zero."""
        thread = jax.lax.rem(jax.lax.div(column, self.width), THREADS)
        return jax.lax.div(thread, THREADS // self.copies)


def part_width(bits: int) -> int:
    """Consecutive values that a thread takes."""
    return UNIT if bits == 3 else UNIT // THREADS
