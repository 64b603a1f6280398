"""Products on tensor cores that are more accurate than their operands' type."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Parts = Sequence[Array]  # bfloat16 arrays of one shape, which stand for their sum


def split(x: Float[Array, "..."], count: int) -> list[Array]:
    """`x` as the sum of `count` bfloat16 arrays, each of which adds 9 bits.

    All but the last are rounded by hand: where a kernel is interpreted, XLA takes a conversion to
    bfloat16 and back for nothing at all, and the rest would be zero.

    Args:
        x: float32.
        count: 3 keeps all of it, 2 a relative error of 2^-18.
    """
    parts = []
    for _ in range(count - 1):
        bits = jax.lax.bitcast_convert_type(x, jnp.uint32) + jnp.uint32(0x8000)
        part = jax.lax.bitcast_convert_type(bits & jnp.uint32(0xFFFF0000), jnp.float32)
        parts.append(part.astype(jnp.bfloat16))
        x = x - part
    return [*parts, x.astype(jnp.bfloat16)]


def product(a: Parts, b: Parts, onto: Array | None = None) -> Float[Array, "m n"]:
    """Matrix product in float32, without the terms that are smaller than what the parts leave out.

    Args:
        a: parts of an [m, k] matrix.
        b: parts of a [k, n] matrix.
        onto: float32 [m, n] that the product is added to.
    """
    count = max(len(a), len(b))
    pairs = [(i, j) for i in range(len(a)) for j in range(len(b)) if i + j < count]
    pairs = sorted(pairs, key=sum, reverse=True)  # small terms first
    terms = [jnp.dot(a[i], b[j], preferred_element_type=jnp.float32) for i, j in pairs]
    return functools.reduce(jnp.add, terms if onto is None else [onto, *terms])
