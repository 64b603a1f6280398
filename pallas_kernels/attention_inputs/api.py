"""From projections to attention: head norms, rotation, and the new tokens' place in the cache."""

from __future__ import annotations

from jaxtyping import Array, Float, Int, Real

from ..attention.scales import BlockScales
from ..dispatch import REFERENCE, Implementation, Operation
from . import reference, triton
from .reference import AttentionInputs

OPERATION = Operation(
    "attention_inputs",
    {
        "triton": Implementation(triton.attention_inputs, triton.refusals),
        REFERENCE: Implementation(reference.attention_inputs, reference.refusals),
    },
)


def attention_inputs(
    q: Float[Array, "B T N G"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    cos: Float[Array, "B T R2"],
    sin: Float[Array, "B T R2"],
    q_weight: Float[Array, " H"] | None = None,
    k_weight: Float[Array, " H"] | None = None,
    key_blocks: Real[Array, "P K Z H"] | None = None,
    value_blocks: Real[Array, "P K Z H"] | None = None,
    block_table: Int[Array, "B W"] | None = None,
    positions: Int[Array, "B T"] | None = None,
    scales: BlockScales | None = None,
    *,
    eps: float = 1e-6,
    zero_centred: bool = False,
    implementation: str | None = None,
) -> AttentionInputs:
    """Norm and rotation of queries and keys; keys and values go into the cache, if there is one.

    Computed in float32 and rounded once, behind the rotation. A token at position p goes to
    row p % Z of block block_table[b, p // Z]. Padding, a position beyond the table and a block
    number outside the pool write nothing.

    Args:
        q: projected queries; G is H, or 2 H where each head is followed by its output gate, which
            is left out here.
        k: projected keys.
        v: projected values.
        cos: cosines of the tokens' angles, float32; column i turns dimensions i and i + R / 2 of
            each head. Dimensions from R on are not turned.
        sin: sines.
        q_weight: weight of the norm over each query head; no norm if None.
        k_weight: of the norm over each key head.
        key_blocks: pool of rotated keys, in k's dtype or int8; None without a cache, as are all
            arguments from here on.
        value_blocks: pool of values.
        block_table: blocks of each sequence.
        positions: positions of each sequence's tokens, one after the other without a gap; negative
            for padding.
        scales: of int8 pools, see `block_attention`. The first token of a block becomes the base of
            its keys.
        eps: of the norms.
        zero_centred: norms multiply by 1 + weight instead of by the weight.
        implementation: "triton" (one launch), "reference", or None for the first that takes the
            call.

    Returns:
        Rotated queries, and either the pools with the new tokens in them (the same memory, where
        they are donated) or, without a cache, rotated keys and values. Queries of padding are
        arbitrary.

    Raises:
        ExceptionGroup: no implementation takes the call, or the named one does not; it says why.
    """
    return OPERATION(
        q,
        k,
        v,
        cos,
        sin,
        q_weight,
        k_weight,
        key_blocks,
        value_blocks,
        block_table,
        positions,
        scales,
        eps=eps,
        zero_centred=zero_centred,
        implementation=implementation,
    )
