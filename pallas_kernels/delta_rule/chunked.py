"""Many tokens a sequence in chunks: four kernels, of which only the last goes token after token."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxtyping import Array, Float, Int

from .._compat import dot
from .chunk_inputs import convolve_chunks
from .chunk_inverse import invert_chunks
from .chunk_overlap import overlap_chunks
from .chunk_pass import pass_chunks
from .config import PassConfig, part_count
from .reference import DeltaRuleOutput
from .ring import write_ring
from .rule import CHUNK
from .slots import in_pool, put_rows, take_rows


def chunked(
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
    slots: Int[Array, " B"] | None,
    *,
    config: PassConfig,
) -> DeltaRuleOutput:
    """`api.gated_delta_rule` in chunks of 64 tokens; arguments as there, the state in place.

    With S the state before a chunk, its tokens write (I + A)^-1 beta (v - exp(g) S^T k). What is in
    front of the parenthesis is found for all chunks at once, the rest in the pass over the chunks.
    """
    step = steps(qkv.shape[1], qkv.dtype, delta_state.shape, config)
    slots, lengths = in_pool(slots, lengths, delta_state.shape[0])
    ring = take_rows(conv_state, slots)  # small beside the state, of which no row is copied
    inputs = step.inputs(qkv, conv_weight, ring, start, lengths)
    overlap = step.overlap(inputs.queries, inputs.keys, b, a, a_log, dt_bias, lengths)
    solution = step.inverse(overlap.system, overlap.beta, lengths)
    mixed, delta_state = step.passing(inputs, solution, overlap, delta_state, start, lengths, slots)
    ring = write_ring(ring, qkv, start, lengths)
    return DeltaRuleOutput(mixed, put_rows(conv_state, slots, lengths, ring), delta_state)


class Steps(NamedTuple):
    """The kernels, each with its settings.

    Attributes:
        inputs: `convolve_chunks`.
        overlap: `overlap_chunks`.
        inverse: `invert_chunks`.
        passing: `pass_chunks`.
    """

    inputs: Callable[..., Any]
    overlap: Callable[..., Any]
    inverse: Callable[..., Any]
    passing: Callable[..., Any]


def steps(length: int, dtype: Any, state: tuple[int, ...], config: PassConfig) -> Steps:
    """What `chunked` calls for T = `length` tokens of this dtype and a state of this shape."""
    _, heads, key_width, value_width = state
    parts = part_count(dtype)
    return Steps(
        functools.partial(
            convolve_chunks,
            tokens=length + -length % CHUNK,
            heads=heads,
            key_width=key_width,
            value_width=value_width,
            parts=parts,
        ),
        overlap_chunks,
        functools.partial(invert_chunks, dot=dot, parts=parts),
        functools.partial(pass_chunks, length=length, dtype=dtype, config=config),
    )
