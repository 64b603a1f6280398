"""Values that one thread holds side by side, taken apart inside a kernel."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array


def parts(x: Array) -> list[Array]:
    """Those along the last axis, whose size is a power of two, in order."""
    if x.shape[-1] == 1:
        return [x.reshape(x.shape[:-1])]
    pairs = x.reshape(*x.shape[:-1], x.shape[-1] // 2, 2)
    even, odd = (parts(part) for part in jnp.unstack(pairs, axis=-1))
    return [part for pair in zip(even, odd, strict=True) for part in pair]
