"""The released routers' rule: a softmax over all experts, of which the largest are taken."""

from __future__ import annotations

from jaxtyping import Array, Bool, Float, Int

from ..dispatch import REFERENCE, Implementation, Operation
from . import reference, triton
from .reference import RouterOutput

OPERATION = Operation(
    "router",
    {
        "triton": Implementation(triton.router, triton.refusals),
        REFERENCE: Implementation(reference.router, reference.refusals),
    },
)


def router(
    x: Float[Array, "M D"],
    weight: Float[Array, "E D"],
    *,
    slots: int,
    renormalise: bool,
    bias: Float[Array, "R E"] | None = None,
    mask: Bool[Array, "Q E"] | None = None,
    valid: Bool[Array, " M"] | None = None,
    limit: Int[Array, " M"] | None = None,
    temperature: Float[Array, " M"] | None = None,
    forced: Bool[Array, "F E"] | None = None,
    scale: Float[Array, "S E"] | None = None,
    part: Int[Array, "1"] | None = None,
    implementation: str | None = None,
) -> RouterOutput:
    """Which experts each token takes, and with what weights.

        logits = x W^T
        score = (logits + bias) / temperature, or -infinity where the mask is False
        p = softmax of a row's scores over all experts

    A row's slots 0, 1, ... hold the experts of its largest scores, in falling order; of equal
    scores the lower id comes first. The weight of a slot is p of its expert, divided by the sum of
    p over the row's filled slots if `renormalise`. Only so many slots are filled as `limit` allows
    and as there are scores above -infinity; none where `valid` is False, whatever x holds there. An
    empty slot has id E and weight 0.

    Experts that are `forced` come before all others when slots are filled, whatever their score;
    the slots are then in falling order of scores as ever, and weights are those of the scores. In
    the end weights are multiplied with the `scale` of their experts.

    All with the accuracy of float32, the products too: no TF32. A score of NaN ranks as +infinity.
    With either among the scores whose p are added up, those of a row's filled slots if
    `renormalise`, else all, all weights of the filled slots are NaN; the ids are those of experts.
    What is infinite in x or in the weight may be NaN in the logits.

    Args:
        x: tokens, such as a norm's output.
        weight: one row an expert.
        slots: A, from 1 to E.
        renormalise: whether the weights of a row's filled slots add up to 1.
        bias: float32, added to the logits. It has M rows, or one for all tokens.
        mask: False where an expert must not be chosen. It has M rows or one, likewise.
        valid: False at padding.
        limit: at most so many slots of a token are filled.
        temperature: float32, positive.
        forced: True where an expert must be chosen. It has M rows or one. The mask goes before.
        scale: float32, factors of the weights. It has M rows or one.
        part: bias, mask, forced and scale have M rows for each of several calls, and those of this
            one come behind so many times M others. A number for which there are no rows is not
            noticed. None where these arrays are of this call alone.
        implementation: "triton", "reference", or None for the first that takes the call.

    Returns:
        int32 ids [M, A], float32 weights [M, A], and float32 logits [M, E] as the product gives
        them: without bias and temperature, and of padding too.

    Raises:
        ExceptionGroup: no implementation takes the call, or the named one does not; it says why.
    """
    return OPERATION(
        x,
        weight,
        bias,
        mask,
        valid,
        limit,
        temperature,
        forced,
        scale,
        part,
        slots=slots,
        renormalise=renormalise,
        implementation=implementation,
    )
