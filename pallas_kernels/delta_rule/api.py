"""The gated delta rule with its short convolution: the mixer of the linear-attention layers."""

from __future__ import annotations

from jaxtyping import Array, Float, Int

from ..dispatch import REFERENCE, Implementation, Operation
from . import reference, triton
from .reference import DeltaRuleOutput

OPERATION = Operation(
    "delta_rule",
    {
        "triton": Implementation(triton.gated_delta_rule, triton.refusals),
        REFERENCE: Implementation(reference.gated_delta_rule, reference.refusals),
    },
)


def gated_delta_rule(
    qkv: Float[Array, "B T C"],
    b: Float[Array, "B T M"],
    a: Float[Array, "B T M"],
    conv_weight: Float[Array, "C W"],
    a_log: Float[Array, " M"],
    dt_bias: Float[Array, " M"],
    conv_state: Float[Array, "P C W"],
    delta_state: Float[Array, "P M Q R"],
    start: Int[Array, " B"],
    lengths: Int[Array, " B"],
    slots: Int[Array, " B"] | None = None,
    *,
    implementation: str | None = None,
) -> DeltaRuleOutput:
    """Convolution, SiLU, L2 norms, gates, state update and read-out of T new tokens a sequence.

    Shapes in letters of this file: M value heads, Q key width, R value width, W taps,
    C = 2 * key heads * Q + M * R channels in the order all q, all k, all v, P rows of the states.
    Value head m reads key head m // (M / key heads).

    Args:
        qkv: projected inputs of the convolution.
        b: logits of beta, the write strength.
        a: input of the decay, g = -exp(a_log) * softplus(a + dt_bias).
        conv_weight: depthwise taps; the last one meets the current token.
        a_log: float32.
        dt_bias: float32.
        conv_state: a ring: column p % W holds the input at position p. Columns of positions before
            the sequence's first are never read, so a reused row needs no clearing.
        delta_state: float32 or bfloat16, taken as zero where `start` is zero. Computed with in
            float32.
        start: tokens that each sequence has seen before this call, from 0 on.
        lengths: how many of the T tokens are real, 0 to T (other numbers give anything); the
            others, on the right, change neither state whatever they hold.
        slots: row of the states that belongs to each sequence; None if there are B rows, the b-th
            for sequence b. A sequence whose slot is no row counts as one without tokens. Two
            sequences with tokens must not share a row: what becomes of it is then undefined.
        implementation: "triton", "reference", or None for the first that takes the call.

    Returns:
        Read-outs [B, T, M, R] in qkv's dtype (arbitrary at padding) and both states, whole, after
        the last real token.

    Raises:
        ExceptionGroup: no implementation takes the call, or the named one does not; it says why.
    """
    return OPERATION(
        qkv,
        b,
        a,
        conv_weight,
        a_log,
        dt_bias,
        conv_state,
        delta_state,
        start,
        lengths,
        slots,
        implementation=implementation,
    )
