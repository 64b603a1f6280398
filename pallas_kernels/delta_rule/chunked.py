"""Many tokens a sequence in chunks: four kernels, of which only the last goes token after token."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .._compat import INTERPRETER, current_target
from .chunk_inputs import convolve_chunks
from .chunk_inverse import invert_chunks
from .chunk_overlap import overlap_chunks
from .chunk_pass import pass_chunks
from .config import PassConfig
from .reference import DeltaRuleOutput
from .ring import write_ring
from .rule import CHUNK


def chunked(
    qkv: Float[Array, "B T C"],
    b: Float[Array, "B T M"],
    a: Float[Array, "B T M"],
    conv_weight: Float[Array, "C W"],
    a_log: Float[Array, " M"],
    dt_bias: Float[Array, " M"],
    conv_state: Float[Array, "B C W"],
    delta_state: Float[Array, "B M Q R"],
    start: Int[Array, " B"],
    lengths: Int[Array, " B"],
    *,
    config: PassConfig,
) -> DeltaRuleOutput:
    """`api.gated_delta_rule` in chunks of 64 tokens; arguments as there, the state in place.

    With S the state before a chunk, its tokens write (I + A)^-1 beta (v - exp(g) S^T k). What is in
    front of the parenthesis is found for all chunks at once, the rest in the pass over the chunks.
    """
    step = steps(qkv.shape[1], qkv.dtype, delta_state.shape, config)
    qk, v = step.inputs(qkv, conv_weight, conv_state, start, lengths)
    overlap = step.overlap(qk, b, a, a_log, dt_bias, lengths)
    solution = step.inverse(overlap.system, overlap.beta, lengths)
    mixed, delta_state = step.passing(qk, v, solution, overlap, delta_state, start, lengths)
    return DeltaRuleOutput(mixed, write_ring(conv_state, qkv, start, lengths), delta_state)


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
    # Products of halves keep 22 bits as TF32, and about 16 as bfloat16 in half the time.
    presets = jax.lax.DotAlgorithmPreset
    exact_dot = _dot(presets.TF32_TF32_F32_X3)
    dot = exact_dot if dtype == jnp.float32 else _dot(presets.BF16_BF16_F32_X3)
    return Steps(
        functools.partial(
            convolve_chunks,
            tokens=length + -length % CHUNK,
            heads=heads,
            key_width=key_width,
            value_width=value_width,
        ),
        functools.partial(overlap_chunks, dot=dot, exact_dot=exact_dot),
        functools.partial(invert_chunks, dot=exact_dot),
        functools.partial(pass_chunks, length=length, dtype=dtype, dot=dot, config=config),
    )


def _dot(preset: jax.lax.DotAlgorithmPreset) -> Callable[[Array, Array], Array]:
    # The interpreter runs on a CPU, which knows no such presets and multiplies in float32.
    precision = None if current_target().platform == INTERPRETER else preset
    return functools.partial(jnp.dot, precision=precision, preferred_element_type=jnp.float32)
