"""What codes that stay raised add to products, taken off by columns of their own.

Tensor cores take codes as `pairs.raised` makes them, in half of the instructions: each more than
the number it stands for, by what its place in a word says. That adds the same to all outputs, a sum
of inputs. Behind the inputs, each row has `COLUMNS` more for all that are multiplied together:
minus that sum, in three numbers of bfloat16 that have 24 bits together. Their product with ones
goes into the same sum as the others. Several writers may have a part of them each.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .config import BLOCK_UNITS
from .layout import CENTRES, UNIT
from .operands import Shape, iota
from .pairs import PLACES_RAISED, raised_by

COLUMNS = 16
# Each needs three columns, and all have as many.
MOST_WRITERS = 4


def is_raised(bits: int) -> bool:
    """Whether there are such codes of so many bits."""
    return bits in PLACES_RAISED


def units_together(shape: Shape) -> int:
    """Units that are multiplied together: a group's, or at 3 bits a block's."""
    return BLOCK_UNITS if shape.bits == 3 else min(shape.group_units, BLOCK_UNITS)


def raised(column: Int[Array, "*s"], bits: int) -> Float[Array, "*s"]:
    """By how much codes that meet a column of the inputs are more than what they stand for."""
    by = raised_by(bits)
    value, found = column & (UNIT - 1), jnp.full(column.shape, CENTRES[bits], jnp.float32)
    for amount in sorted(set(by)):
        places = sum(1 << index for index in range(UNIT) if by[index % len(by)] == amount)
        here = (jnp.uint32(places) >> value.astype(jnp.uint32)) & jnp.uint32(1)
        found = found + amount * here.astype(jnp.float32)
    return found


def columns_of(total: Float[Array, "*s"], writers: int) -> Float[Array, "*s c"]:
    """A writer's columns: minus its sum in three numbers, and zeros.

    Args:
        total: sums of inputs times `raised`.
        writers: of `COLUMNS`, at most `MOST_WRITERS`, a power of two.
    """
    rest, parts = -total, []
    for _ in range(3):
        parts.append(rest.astype(jnp.bfloat16))
        rest = rest - parts[-1].astype(jnp.float32)
    size = *total.shape, COLUMNS // writers
    column, found = iota(size, len(size) - 1), jnp.zeros(size, jnp.bfloat16)
    for index, part in enumerate(parts):
        found = jnp.where(column == index, jnp.broadcast_to(part[..., None], size), found)
    return found
