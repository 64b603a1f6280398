"""Causal self-attention of whole sequences, without a cache."""

from __future__ import annotations

from jaxtyping import Array, Float

from ..dispatch import REFERENCE, Implementation, Operation
from . import reference

OPERATION = Operation(
    "flash_attention",
    {REFERENCE: Implementation(reference.flash_attention, reference.refusals)},
)


def flash_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    *,
    window: int | None = None,
    implementation: str | None = None,
) -> Float[Array, "B T N H"]:
    """Causal softmax attention with grouped queries, scores in float32.

    Query head n reads key/value head n // (N / K). Padding on the right needs no mask: no real
    token sees it.

    Args:
        q: queries, already rotated; scaled by H^-0.5 here.
        k: keys, already rotated.
        v: values.
        window: if given, a query sees its own position and the window - 1 before it.
        implementation: "reference", or None for the first that takes the call.

    Returns:
        The attended values in q's dtype.

    Raises:
        ExceptionGroup: no implementation takes the call; it says why.
        ValueError: there is no implementation of that name.
    """
    return OPERATION(q, k, v, window=window, implementation=implementation)
