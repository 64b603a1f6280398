"""The definition in plain jax.numpy."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._compat import Target


class NormOutput(NamedTuple):
    """The norm, and the sum that it is of: None where nothing was added."""

    normal: Array
    total: Any


def rms_norm(
    x: Float[Array, "... D"],
    weight: Float[Array, " D"],
    y: Float[Array, "... D"] | None,
    gate: Float[Array, "... D"] | None,
    *,
    eps: float,
    zero_centred: bool,
    dtype: Any,
) -> NormOutput:
    """See `api.add_rms_norm`, and `api.gated_rms_norm` for the gate."""
    total = None if y is None else x + y.astype(x.dtype)
    wide = (x if total is None else total).astype(jnp.float32)
    normal = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    scale = weight.astype(jnp.float32)
    scale = jnp.broadcast_to(1.0 + scale if zero_centred else scale, x.shape)
    if gate is None:
        return NormOutput((normal * scale).astype(dtype), total)
    weighted = normal.astype(x.dtype).astype(jnp.float32) * scale
    gated = weighted * jax.nn.silu(gate.astype(jnp.float32))
    return NormOutput(gated.astype(dtype), total)


def refusals(
    target: Target,
    x: Any,
    weight: Any,
    y: Any,
    gate: Any,
    *,
    eps: float,
    zero_centred: bool,
    dtype: Any,
) -> list[str]:
    """What gives a call no meaning; see `dispatch.Implementation`."""
    if not isinstance(eps, int | float) or not eps >= 0:
        return [f"eps is {eps}; accepted is a number from 0 on"]
    return []
