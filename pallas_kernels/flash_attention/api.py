"""Causal self-attention of whole sequences, without a cache."""

from __future__ import annotations

from jaxtyping import Array, Float, Int

from ..dispatch import REFERENCE, Implementation, Operation
from . import cudnn, reference, triton

OPERATION = Operation(
    "flash_attention",
    {
        # On an H200 it needs 0.6 to 0.7 of the kernel's time, where it takes the call.
        "cudnn": Implementation(cudnn.flash_attention, cudnn.refusals),
        "triton": Implementation(triton.flash_attention, triton.refusals),
        REFERENCE: Implementation(reference.flash_attention, reference.refusals),
    },
)


def flash_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    cu_seqlens: Int[Array, " C1"] | None = None,
    *,
    window: int | None = None,
    implementation: str | None = None,
) -> Float[Array, "B T N H"]:
    """Causal softmax attention with grouped queries, scores in float32.

    Query head n reads key/value head n // (N / K). Padding on the right of a row needs no mask, as
    long as it is finite: no real token sees it. Sequences of unequal length can be packed into one
    row instead, one after the other.

    Args:
        q: queries, already rotated; scaled by H^-0.5 here.
        k: keys, already rotated.
        v: values.
        cu_seqlens: if given, the one row (B = 1) holds C = C1 - 1 packed sequences; sequence i has
            the tokens cu_seqlens[i] to cu_seqlens[i + 1] - 1. So the first number is 0, none is
            less than the one before, and the last is at most T. That is not checked: other numbers
            give other sequences, or zeros. Sequences may be empty. Tokens behind the last sequence
            are padding, which may hold anything and whose result is zero.
        window: if given, a query sees its own position and the window - 1 before it.
        implementation: "cudnn" (no packed sequences, no float32), "triton", "reference", or None
            for the first that takes the call.

    Returns:
        The attended values in q's dtype.

    Raises:
        ExceptionGroup: no implementation takes the call, or the named one does not; it says why.
    """
    return OPERATION(q, k, v, cu_seqlens, window=window, implementation=implementation)
