"""Causal attention of new tokens over a block cache that already holds their keys and values."""

from __future__ import annotations

from jaxtyping import Array, Float, Int, Real

from ..attention.scales import BlockScales
from ..dispatch import REFERENCE, Implementation, Operation
from . import reference, triton

OPERATION = Operation(
    "block_attention",
    {
        "triton": Implementation(triton.block_attention, triton.refusals),
        REFERENCE: Implementation(reference.block_attention, reference.refusals),
    },
)


def block_attention(
    q: Float[Array, "B T N H"],
    key_blocks: Real[Array, "P K Z H"],
    value_blocks: Real[Array, "P K Z H"],
    block_table: Int[Array, "B W"],
    positions: Int[Array, "B T"],
    scales: BlockScales | None = None,
    *,
    window: int | None = None,
    sinks: int = 0,
    implementation: str | None = None,
) -> Float[Array, "B T N H"]:
    """Attention of each query over the cached tokens at its position and before.

    Query head n reads key/value head n // (N / K). Unused cache rows may hold anything, NaN
    included.

    Args:
        q: queries, already rotated; scaled by H^-0.5 here.
        key_blocks: pool of keys; block p of a head is one [Z, H] tile. In q's dtype, or int8 codes
            beside `scales`.
        value_blocks: pool of values, likewise.
        block_table: block_table[b, i] holds the tokens i * Z to (i + 1) * Z - 1 of sequence b. A
            number outside the pool counts as the nearest in it.
        positions: position of each query in its sequence; negative for padding, whose result is
            zero. Beyond the table, a query sees what of its window the table holds.
        scales: what int8 codes stand for; None for a pool that holds keys and values themselves.
        window: if given, a query sees its own position and the window - 1 before it.
        sinks: with a window, this many first tokens of the sequence stay visible too (Xiao et al.,
            "Efficient Streaming Language Models with Attention Sinks", arXiv 2309.17453). Their
            keys keep the positions that they were rotated for.
        implementation: "triton" (heads of 64, 128 or 256 and blocks of 16, 32, 64 or 128 tokens, in
            bfloat16 or float32), "reference", or None for the first that takes the call.

    Returns:
        The attended values in q's dtype.

    Raises:
        ExceptionGroup: no implementation takes the call, or the named one does not; it says why.
    """
    return OPERATION(
        q,
        key_blocks,
        value_blocks,
        block_table,
        positions,
        scales,
        window=window,
        sinks=sinks,
        implementation=implementation,
    )
