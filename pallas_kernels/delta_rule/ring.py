"""The ring of a short convolution's newest inputs."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def write_ring(
    conv_state: Float[Array, "B C W"],
    qkv: Float[Array, "B T C"],
    start: Int[Array, " B"],
    lengths: Int[Array, " B"],
) -> Float[Array, "B C W"]:
    """The ring after the last real token: a column keeps the newest position that falls on it.

    Args:
        conv_state: the ring before; column p % W holds the input at position p.
        qkv: new inputs; those behind `lengths` are not read.
        start: position of the first of them.
        lengths: how many are real.
    """
    taps = conv_state.shape[-1]
    last = (start + lengths - 1)[:, None]
    column = jnp.arange(taps, dtype=jnp.int32)[None, :]
    token = last - (last - column) % taps - start[:, None]
    new = jnp.take_along_axis(qkv, jnp.maximum(token, 0)[:, :, None], axis=1)
    new = new.transpose(0, 2, 1).astype(conv_state.dtype)
    return jnp.where((token >= 0)[:, None, :], new, conv_state)
