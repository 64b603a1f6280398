"""The gated delta rule with its short convolution: the mixer of the linear-attention layers.

Yang et al., "Gated Delta Networks: Improving Mamba2 with Delta Rule" (arXiv 2412.06464). One call
takes a ragged batch of new tokens from the projections to the read-outs and carries both states, so
that a kernel can do the whole in one launch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .._compat import Target
from .ring import write_ring
from .rule import chunked_rule, recurrent_rule
from .slots import in_pool, put_rows, take_rows


class DeltaRuleOutput(NamedTuple):
    """What `gated_delta_rule` returns."""

    mixed: Float[Array, "B T M R"]
    conv_state: Float[Array, "P C W"]
    delta_state: Float[Array, "P M Q R"]


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
) -> DeltaRuleOutput:
    """See `api.gated_delta_rule`."""
    batch, length, _ = qkv.shape
    slots, lengths = in_pool(slots, lengths, delta_state.shape[0])
    ring, before = take_rows(conv_state, slots), take_rows(delta_state, slots)
    _, heads, key_width, value_width = delta_state.shape
    real = jnp.arange(length, dtype=jnp.int32)[None, :] < lengths[:, None]
    # Zero g and beta would not do for padding that holds NaN or infinity.
    window = _with_history(jnp.where(real[..., None], qkv, 0), ring, start)
    mixed = jax.nn.silu(_convolve(window, conv_weight, length))

    value_dim = heads * value_width
    key_dim = (qkv.shape[-1] - value_dim) // 2
    q, k, v = jnp.split(mixed.astype(jnp.float32), [key_dim, 2 * key_dim], axis=-1)
    key_heads = key_dim // key_width
    q = _l2_normalise(q.reshape(batch, length, key_heads, key_width)) * key_width**-0.5
    k = _l2_normalise(k.reshape(batch, length, key_heads, key_width))
    q, k = (jnp.repeat(x, heads // key_heads, axis=2) for x in (q, k))
    v = v.reshape(batch, length, heads, value_width)

    beta = jax.nn.sigmoid(b.astype(jnp.float32))
    step = jax.nn.softplus(a.astype(jnp.float32) + dt_bias[None, None, :])
    g = -jnp.exp(a_log)[None, None, :] * step
    beta = jnp.where(real[..., None], beta, 0.0)
    g = jnp.where(real[..., None], g, 0.0)

    state = jnp.where((start == 0)[:, None, None, None], 0.0, before.astype(jnp.float32))
    rule = recurrent_rule if length == 1 else chunked_rule
    read, state = rule(q, k, v, g, beta, state)
    state = jnp.where((lengths > 0)[:, None, None, None], state.astype(before.dtype), before)
    ring = write_ring(ring, qkv, start, lengths)
    return DeltaRuleOutput(
        read.astype(qkv.dtype),
        put_rows(conv_state, slots, lengths, ring),
        put_rows(delta_state, slots, lengths, state),
    )


def refusals(target: Target, *arrays: Any) -> list[str]:
    """What gives a call no meaning; see `dispatch.Implementation`."""
    qkv, conv_state, delta_state = arrays[0], arrays[6], arrays[7]
    slots = arrays[10] if len(arrays) > 10 else None
    rows, held = qkv.shape[0], (conv_state.shape[0], delta_state.shape[0])
    if slots is None and held != (rows, rows):
        return [f"conv_state and delta_state have {held} rows, not {rows} each: name their slots"]
    _, heads, key_width, value_width = delta_state.shape
    rest = qkv.shape[2] - heads * value_width
    if rest <= 0 or rest % (2 * key_width):
        return [
            f"{qkv.shape[2]} channels are not {heads} value heads of {value_width} and twice a "
            f"number of key heads of {key_width}"
        ]
    key_heads = rest // (2 * key_width)
    if heads % key_heads:
        return [f"{heads} value heads cannot share {key_heads} key heads evenly"]
    return []


def _with_history(
    qkv: Float[Array, "B T C"], conv_state: Float[Array, "B C W"], start: Int[Array, " B"]
) -> Float[Array, "B S C"]:
    """The W - 1 inputs before the new ones (zero before the sequence's beginning), then those."""
    taps = conv_state.shape[-1]
    position = start[:, None] + jnp.arange(1 - taps, 0, dtype=jnp.int32)[None, :]
    past = jnp.take_along_axis(conv_state, (position % taps)[:, None, :], axis=2)
    past = jnp.where((position >= 0)[:, None, :], past, 0)
    return jnp.concatenate([past.transpose(0, 2, 1).astype(qkv.dtype), qkv], axis=1)


def _convolve(
    window: Float[Array, "B S C"], weight: Float[Array, "C W"], length: int
) -> Float[Array, "B T C"]:
    """Causal depthwise convolution of the last `length` positions, summed in float32."""
    total = jnp.zeros((window.shape[0], length, window.shape[2]), jnp.float32)
    for tap in range(weight.shape[1]):
        inputs = window[:, tap : tap + length].astype(jnp.float32)
        total += inputs * weight[None, None, :, tap].astype(jnp.float32)
    return total.astype(window.dtype)


def _l2_normalise(x: Float[Array, "... Q"]) -> Float[Array, "... Q"]:
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)
