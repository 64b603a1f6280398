"""Inputs of `gated_delta_rule` for its benchmark, and the formulas in float64."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.delta_rule.specs import Spec


@dataclasses.dataclass(frozen=True)
class Case:
    """A call whose result is checked.

    Attributes:
        spec: shapes and dtypes.
        lengths: real tokens, one number a sequence or one for all; all of them if empty.
        start: tokens before, likewise.
        tokens: "random"; "repeating": four tokens in turn, written with beta near 1.
        decay: "mixed": heads from slow to fast, as in trained models; "weak"; "strong at times".
    """

    spec: Spec
    lengths: tuple[int, ...] = ()
    start: tuple[int, ...] = (7,)
    tokens: str = "random"
    decay: str = "mixed"

    def counts(self) -> tuple[np.ndarray, np.ndarray]:
        """`start` and `lengths` of each sequence."""
        both = (self.start, self.lengths or (self.spec.length,))
        first, second = (np.resize(np.array(x, np.int32), self.spec.batch) for x in both)
        return first, second


@functools.lru_cache(maxsize=2)
def arguments(case: Case) -> tuple[jax.Array, ...]:
    """The call's arrays; NaN is what must not be read."""
    spec, rng = case.spec, np.random.default_rng(0)
    start, lengths = case.counts()
    batch, length, heads, taps = spec.batch, spec.length, spec.heads, spec.taps

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32)

    widths = (spec.channels, heads, heads)
    qkv, b, a = (draw(batch, length, width) for width in widths)
    if case.tokens == "repeating":
        qkv = np.take(qkv, np.arange(length) % 4, axis=1)
        b += 4
    if case.decay != "mixed":
        a -= 12
    if case.decay == "strong at times":
        a[rng.random(a.shape) < 0.05] = 30
    for row, count in enumerate(lengths):
        for x in (qkv, b, a):
            x[row, count:] = np.nan
    ring = draw(batch, spec.channels, taps)
    state = draw(batch, heads, spec.key_width, spec.value_width)
    for row, before in enumerate(start):
        ring[row, :, before % taps] = np.nan
        if before == 0:
            ring[row], state[row] = np.nan, np.nan
    a_log = np.log(np.geomspace(0.01, 16, heads)).astype(np.float32)
    taken = (qkv, b, a, draw(spec.channels, taps) * np.float32(taps**-0.5), ring)
    qkv, b, a, weight, ring = (jnp.asarray(x).astype(jnp.dtype(spec.dtype)) for x in taken)
    state = jnp.asarray(state).astype(jnp.dtype(spec.state_dtype))
    constants = jnp.asarray(a_log), jnp.asarray(draw(heads))
    return qkv, b, a, weight, *constants, ring, state, jnp.asarray(start), jnp.asarray(lengths)


def expected(arrays: tuple[jax.Array, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Read-outs, ring and state, token by token in float64 on the device; zero at padding."""
    with jax.enable_x64(True):
        wide = [x.astype(jnp.float64) for x in arrays[:8]]
        return tuple(np.asarray(x) for x in _formulas(*wide, *arrays[8:]))


@jax.jit
def _formulas(qkv, b, a, weight, a_log, dt_bias, ring, state, start, lengths) -> Any:
    batch, length, channels = qkv.shape
    _, heads, key_width, value_width = state.shape
    taps = weight.shape[1]
    key_dim = (channels - heads * value_width) // 2
    group = heads * key_width // key_dim
    rows = jnp.arange(batch)

    def unit(x: jax.Array) -> jax.Array:
        x = x.reshape(batch, -1, key_width)
        x = x / jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)
        return jnp.repeat(x, group, axis=1)

    def token(carry: tuple[jax.Array, ...], index: jax.Array) -> tuple[Any, jax.Array]:
        ring, state = carry
        real, position = index < lengths, start + index
        now = qkv[:, index]
        new_ring = ring.at[rows, :, position % taps].set(now)
        total = jnp.zeros((batch, channels))
        for back in range(taps):
            x = new_ring[rows, :, (position - back) % taps]
            total += jnp.where((position >= back)[:, None], x, 0) * weight[:, taps - 1 - back]
        total = total / (1 + jnp.exp(-total))
        q = unit(total[:, :key_dim]) / jnp.sqrt(1.0 * key_width)
        k = unit(total[:, key_dim : 2 * key_dim])
        v = total[:, 2 * key_dim :].reshape(batch, heads, value_width)
        beta = 1 / (1 + jnp.exp(-b[:, index]))
        decay = jnp.exp(-jnp.exp(a_log) * jnp.logaddexp(a[:, index] + dt_bias, 0.0))
        before = jnp.where((position == 0)[:, None, None, None], 0.0, state)
        s = before * decay[..., None, None]
        written = beta[..., None] * (v - jnp.sum(s * k[..., None], axis=2))
        s = s + k[..., None] * written[:, :, None, :]
        read = jnp.where(real[:, None, None], jnp.sum(s * q[..., None], axis=2), 0.0)
        ring = jnp.where(real[:, None, None], new_ring, ring)
        return (ring, jnp.where(real[:, None, None, None], s, state)), read

    (ring, state), read = jax.lax.scan(token, (ring, state), jnp.arange(length))
    return jnp.swapaxes(read, 0, 1), ring, state
