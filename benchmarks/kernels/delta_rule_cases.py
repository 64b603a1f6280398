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
    """The call's arrays, drawn on the device; NaN is what must not be read."""
    return _arguments(case, *(jnp.asarray(x) for x in case.counts()))


@functools.partial(jax.jit, static_argnums=0)
def _arguments(case: Case, start: jax.Array, lengths: jax.Array) -> tuple[jax.Array, ...]:
    spec, keys = case.spec, iter(jax.random.split(jax.random.key(0), 9))
    batch, length, heads, taps = spec.batch, spec.length, spec.heads, spec.taps
    dtype, state_dtype = jnp.dtype(spec.dtype), jnp.dtype(spec.state_dtype)

    def draw(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape, jnp.float32)

    qkv, b, a = (draw(batch, length, width) for width in (spec.channels, heads, heads))
    if case.tokens == "repeating":
        qkv = jnp.take(qkv, jnp.arange(length) % 4, axis=1)
        b += 4
    if case.decay != "mixed":
        a -= 12
    if case.decay == "strong at times":
        a = jnp.where(jax.random.uniform(next(keys), a.shape) < 0.05, 30, a)
    padding = (jnp.arange(length)[None, :] >= lengths[:, None])[..., None]
    qkv, b, a = (jnp.where(padding, jnp.nan, x) for x in (qkv, b, a))
    fresh = (start == 0)[:, None, None]
    unread = fresh | (jnp.arange(taps) == (start % taps)[:, None, None])
    ring = jnp.where(unread, jnp.nan, draw(batch, spec.channels, taps))
    state = draw(batch, heads, spec.key_width, spec.value_width)
    state = jnp.where(fresh[..., None], jnp.nan, state).astype(state_dtype)
    weight = draw(spec.channels, taps) * taps**-0.5
    a_log = jnp.log(jnp.geomspace(0.01, 16, heads, dtype=jnp.float32))
    qkv, b, a, weight, ring = (x.astype(dtype) for x in (qkv, b, a, weight, ring))
    return qkv, b, a, weight, a_log, draw(heads), ring, state, start, lengths


def expected(arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Read-outs, ring and state, token by token in float64 on the device; zero at padding."""
    with jax.enable_x64(True):
        wide = [x.astype(jnp.float64) for x in arrays[:8]]
        return _formulas(*wide, *arrays[8:])


def relative_errors(value: jax.Array, wanted: jax.Array, live: jax.Array) -> tuple[float, float]:
    """`testing.relative_error`, and that of the mere rounding to bfloat16; of the live rows."""
    with jax.enable_x64(True):
        error, rounding = _relative_errors(value, wanted, live)
        return float(error), float(rounding)


@jax.jit
def _relative_errors(value: jax.Array, wanted: jax.Array, live: jax.Array) -> tuple[Any, Any]:
    live = live.reshape(-1, *(1,) * (wanted.ndim - 1))
    value, wanted = (jnp.where(live, x.astype(jnp.float64), 0) for x in (value, wanted))
    size = jnp.sqrt(jnp.sum(wanted**2) / (live.sum() * wanted[0].size))
    rounded = jax.lax.reduce_precision(wanted, 8, 7)
    return jnp.abs(value - wanted).max() / size, jnp.abs(rounded - wanted).max() / size


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
