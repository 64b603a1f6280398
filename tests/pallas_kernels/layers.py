"""A layer of the gated delta rule: its sizes, weights and inputs, and the formulas in float64."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass
class Layer:
    """Sizes of a layer, its small weights, and the formulas."""

    key_heads: int = 2
    heads: int = 4
    key_width: int = 8
    value_width: int = 6
    taps: int = 4

    def __post_init__(self):
        rng = np.random.default_rng(2)
        self.key_dim = self.key_heads * self.key_width
        self.channels = 2 * self.key_dim + self.heads * self.value_width
        self.conv_weight = rng.standard_normal((self.channels, self.taps)).astype(np.float32)
        self.a_log = rng.uniform(0, 2.7, self.heads).astype(np.float32)
        self.dt_bias = rng.standard_normal(self.heads).astype(np.float32)

    @property
    def weights(self):
        return self.conv_weight, self.a_log, self.dt_bias

    def inputs(self, batch: int, length: int):
        """Random qkv, b and a."""
        rng = np.random.default_rng(3)
        widths = (self.channels, self.heads, self.heads)
        return [rng.standard_normal((batch, length, n)).astype(np.float32) for n in widths]

    def states(self, batch: int, fill: float, dtype=jnp.float32):
        conv = jnp.full((batch, self.channels, self.taps), fill, dtype)
        shape = (batch, self.heads, self.key_width, self.value_width)
        return conv, jnp.full(shape, fill, jnp.float32)

    def oracle(self, qkv, b, a, conv_weight, a_log, dt_bias, state=None, history=None):
        """Read-outs and state after the tokens of one sequence; `history` is the inputs before."""
        if state is None:
            state = np.zeros((self.heads, self.key_width, self.value_width))
        if history is None:
            history = np.zeros((self.taps - 1, self.channels))
        state, known = np.array(state, np.float64), np.concatenate([history, qkv])
        read = np.zeros((len(qkv), self.heads, self.value_width))
        for t in range(len(qkv)):
            c = sum(conv_weight[:, j] * known[t + j] for j in range(self.taps))
            c = c / (1 + np.exp(-c))
            q = unit(c[: self.key_dim].reshape(self.key_heads, -1)) / np.sqrt(self.key_width)
            k = unit(c[self.key_dim : 2 * self.key_dim].reshape(self.key_heads, -1))
            v = c[2 * self.key_dim :].reshape(self.heads, -1)
            beta = 1 / (1 + np.exp(-b[t]))
            g = -np.exp(a_log) * np.logaddexp(0, a[t] + dt_bias)
            for h in range(self.heads):
                of = h // (self.heads // self.key_heads)
                s = np.exp(g[h]) * state[h]
                s = s + np.outer(k[of], beta[h] * (v[h] - s.T @ k[of]))
                state[h], read[t, h] = s, s.T @ q[of]
        return read, state

    def expected(self, qkv, b, a, **before):
        wide = (np.asarray(x, np.float64) for x in (qkv, b, a, *self.weights))
        return self.oracle(*wide, **before)


def unit(x):
    return x / np.sqrt((x * x).sum(axis=-1, keepdims=True) + 1e-6)


def assert_ring(conv_state, qkv):
    """Column p % taps holds the input at position p, for the newest positions."""
    conv_state, taps = np.asarray(conv_state), conv_state.shape[-1]
    for position in range(max(0, len(qkv) - taps), len(qkv)):
        np.testing.assert_array_equal(conv_state[:, position % taps], qkv[position])
