"""Root-mean-square norms over the last axis: alone, after an addition, and under a gate."""

from __future__ import annotations

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from ..dispatch import REFERENCE, Implementation, Operation
from . import reference, triton
from .reference import NormOutput

OPERATION = Operation(
    "rms_norm",
    {
        "triton": Implementation(triton.rms_norm, triton.refusals),
        REFERENCE: Implementation(reference.rms_norm, reference.refusals),
    },
)


def rms_norm(
    x: Float[Array, "... D"],
    weight: Float[Array, " D"],
    *,
    eps: float,
    zero_centred: bool = False,
    dtype: DTypeLike | None = None,
    implementation: str | None = None,
) -> Float[Array, "... D"]:
    """Rows x / sqrt(mean(x^2) + eps) * w, in float32 and rounded once.

    Args:
        x: rows.
        weight: w.
        eps: keeps rows of zeros finite.
        zero_centred: multiply by 1 + w instead.
        dtype: of the result; x's if None.
        implementation: "triton", "reference", or None for the first that takes the call.

    Raises:
        ExceptionGroup: no implementation takes the call, or the named one does not; it says why.
    """
    return OPERATION(
        x,
        weight,
        None,
        None,
        eps=eps,
        zero_centred=zero_centred,
        dtype=jnp.dtype(dtype or x.dtype),
        implementation=implementation,
    ).normal


def add_rms_norm(
    x: Float[Array, "... D"],
    y: Float[Array, "... D"],
    weight: Float[Array, " D"],
    *,
    eps: float,
    zero_centred: bool = False,
    dtype: DTypeLike | None = None,
    implementation: str | None = None,
) -> NormOutput:
    """The sum x + y, and its `rms_norm`.

    Args:
        x: rows; the sum has their dtype, and what is normalised is the rounded sum.
        y: what is added to them, rounded to x's dtype first.
        weight: see `rms_norm`.
        eps: see there.
        zero_centred: see there.
        dtype: of the norm; x's if None.
        implementation: see there.

    Returns:
        The norm and the sum.

    Raises:
        ExceptionGroup: no implementation takes the call, or the named one does not; it says why.
    """
    return OPERATION(
        x,
        weight,
        y,
        None,
        eps=eps,
        zero_centred=zero_centred,
        dtype=jnp.dtype(dtype or x.dtype),
        implementation=implementation,
    )


def gated_rms_norm(
    x: Float[Array, "... D"],
    gate: Float[Array, "... D"],
    weight: Float[Array, " D"],
    *,
    eps: float,
    implementation: str | None = None,
) -> Float[Array, "... D"]:
    """Rows x / sqrt(mean(x^2) + eps) * w * silu(gate): in float32, rounded before w and at the end.

    Args:
        x: rows, such as the heads of all tokens.
        gate: one number for each of x.
        weight: w.
        eps: keeps rows of zeros finite.
        implementation: "triton", "reference", or None for the first that takes the call.

    Returns:
        The gated norm in x's dtype.

    Raises:
        ExceptionGroup: no implementation takes the call, or the named one does not; it says why.
    """
    return OPERATION(
        x,
        weight,
        None,
        gate,
        eps=eps,
        zero_centred=False,
        dtype=x.dtype,
        implementation=implementation,
    ).normal
