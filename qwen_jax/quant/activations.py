"""Activations in few bits, as numbers only: rounded to a grid and kept as floats, for research."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import jax.numpy as jnp
from jaxtyping import Array, Float

from ..errors import RequestError

ActivationKind = Literal["dynamic", "static"]
ACTIVATION_BITS = range(3, 9)


@dataclass(frozen=True)
class ActivationFormat:
    """How inputs of matrices are rounded.

    Attributes:
        bits: of a code, 3 to 8.
        kind: "dynamic", one scale a token, from the token; or "static", one scale a channel, from
            calibration.
    """

    bits: int
    kind: ActivationKind = "dynamic"

    def __post_init__(self):
        if self.bits not in ACTIVATION_BITS:
            raise RequestError(f"activation bits are {self.bits!r}; accepted are 3 to 8")
        if self.kind not in get_args(ActivationKind):
            raise RequestError(
                f"activation kind is {self.kind!r}; accepted are {get_args(ActivationKind)}"
            )

    @property
    def largest_code(self) -> int:
        """Codes go from its negative to it: 3, 7, 15, 31, 63 or 127."""
        return 2 ** (self.bits - 1) - 1


def fake_quantise(
    x: Float[Array, "... i"], format: ActivationFormat, scale: Float[Array, "... i"] | None = None
) -> Float[Array, "... i"]:
    """Round to the nearest code times scale, half to even; float32 in the result as inside.

    y = scale * clip(round(x / scale), -Q, Q) with Q = 2^(bits - 1) - 1. A dynamic scale is the
    largest |x| of the last axis divided by Q, so that nothing is clipped; zeros stay zeros.

    Args:
        x: activations.
        format: bits and kind.
        scale: of each channel, above 0; for the static kind alone.

    Raises:
        RequestError: a scale with the dynamic kind, or none with the static one.
    """
    if (scale is None) != (format.kind == "dynamic"):
        raise RequestError(
            f"activations of kind {format.kind!r} {'need' if scale is None else 'take no'} scale"
        )
    x, top = x.astype(jnp.float32), format.largest_code
    if scale is None:
        scale = jnp.max(jnp.abs(x), axis=-1, keepdims=True) / top
        scale = jnp.where(scale > 0, scale, 1.0)
    scale = jnp.broadcast_to(scale, x.shape)
    return scale * jnp.clip(jnp.round(x / scale), -top, top)
