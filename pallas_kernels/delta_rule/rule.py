"""The rule itself on per-head tensors, token by token and in chunks: the same function twice."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .triangular import unit_lower_inverse

CHUNK = 64

# On a GPU the default would round float32 operands to TF32, and the state remembers every rounding.
_einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


def recurrent_rule(
    q: Float[Array, "B T M Q"],
    k: Float[Array, "B T M Q"],
    v: Float[Array, "B T M R"],
    g: Float[Array, "B T M"],
    beta: Float[Array, "B T M"],
    state: Float[Array, "B M Q R"],
) -> tuple[Float[Array, "B T M R"], Float[Array, "B M Q R"]]:
    """One token after the other, float32.

    Per head: S <- exp(g) S;  S <- S + k (beta (v - S^T k))^T;  o = S^T q. Arguments as in
    `chunked_rule`.
    """

    def token(state: Array, inputs: tuple[Array, ...]) -> tuple[Array, Array]:
        q, k, v, g, beta = inputs
        state = state * jnp.exp(g)[..., None, None]
        predicted = _einsum("bmqr,bmq->bmr", state, k)
        written = (v - predicted) * beta[..., None]
        state = state + k[..., :, None] * written[..., None, :]
        return state, _einsum("bmqr,bmq->bmr", state, q)

    if q.shape[1] == 1:
        state, read = token(state, (q[:, 0], k[:, 0], v[:, 0], g[:, 0], beta[:, 0]))
        return read[:, None], state
    time_first = tuple(jnp.moveaxis(x, 1, 0) for x in (q, k, v, g, beta))
    state, read = jax.lax.scan(token, state, time_first)
    return jnp.moveaxis(read, 0, 1), state


def chunked_rule(
    q: Float[Array, "B T M Q"],
    k: Float[Array, "B T M Q"],
    v: Float[Array, "B T M R"],
    g: Float[Array, "B T M"],
    beta: Float[Array, "B T M"],
    state: Float[Array, "B M Q R"],
) -> tuple[Float[Array, "B T M R"], Float[Array, "B M Q R"]]:
    """The rule in chunks of 64 tokens: dense products inside, one state update a chunk, float32.

    Args:
        q: queries, L2-normalised and scaled.
        k: keys, L2-normalised.
        v: values.
        g: log decay, <= 0; zero at padding.
        beta: write strength; zero at padding.
        state: state before the first token.

    Returns:
        Read-outs and the state after the last token.
    """
    batch, length, heads, _ = q.shape
    padding = -length % CHUNK
    chunks = (length + padding) // CHUNK

    def chunked(x: Array) -> Array:
        """[B, T, M, ...] -> [chunks, B, M, CHUNK, ...]."""
        x = jnp.pad(x, ((0, 0), (0, padding)) + ((0, 0),) * (x.ndim - 2))
        x = x.reshape(batch, chunks, CHUNK, heads, *x.shape[3:])
        return jnp.moveaxis(jnp.moveaxis(x, 3, 2), 1, 0)

    q, k, v, g, beta = (chunked(x) for x in (q, k, v, g, beta))
    coarse, fine = _cumulated(g)
    total = coarse + fine
    row, column = jnp.arange(CHUNK)[:, None], jnp.arange(CHUNK)[None, :]
    lower = (row >= column)[None, None, None]
    gap = _difference(coarse, coarse) + _difference(fine, fine)
    decay = jnp.exp(jnp.where(lower, gap, -jnp.inf))

    overlap = _einsum("cbmiq,cbmjq->cbmij", k, k) * decay * beta[..., :, None]
    system = jnp.where((row > column)[None, None, None], overlap, 0.0)
    right = jnp.concatenate([v, k * jnp.exp(total)[..., None]], axis=-1) * beta[..., None]
    solved = _einsum("cbmij,cbmjs->cbmis", unit_lower_inverse(system), right)
    values, keys = jnp.split(solved, [v.shape[-1]], axis=-1)
    attention = _einsum("cbmiq,cbmjq->cbmij", q, k) * decay
    queries = q * jnp.exp(total)[..., None]
    writers = k * jnp.exp(gap[..., -1, :])[..., None]
    last = total[..., -1:]

    # Read-outs take the place of the values chunk by chunk. As a stacked output of the scan they
    # would start as zeros, which XLA allocates for all layers of a model at once.
    def chunk(carry: tuple[Array, Array], inputs: tuple[Array, ...]) -> tuple[Any, None]:
        state, values = carry
        number, keys, attention, queries, writers, last = inputs
        written = values[number] - _einsum("bmiq,bmqr->bmir", keys, state)
        read = _einsum("bmiq,bmqr->bmir", queries, state)
        read += _einsum("bmij,bmjr->bmir", attention, written)
        state = state * jnp.exp(last)[..., None]
        state = state + _einsum("bmiq,bmir->bmqr", writers, written)
        return (state, values.at[number].set(read)), None

    number = jnp.arange(chunks, dtype=jnp.int32)
    (state, read), _ = jax.lax.scan(
        chunk, (state, values), (number, keys, attention, queries, writers, last)
    )
    read = jnp.moveaxis(jnp.moveaxis(read, 0, 1), 2, 3)
    read = read.reshape(batch, chunks * CHUNK, heads, v.shape[-1])
    return read[:, :length], state


def _cumulated(g: Float[Array, "... c"]) -> tuple[Float[Array, "... c"], Float[Array, "... c"]]:
    """Running sums of g in two parts, whose differences are as exact as g itself.

    One float32 sum would not do: past a few strong decays it runs to thousands, and a weak decay
    behind them, as the difference of two such sums, would keep three digits. So the part of g that
    is a multiple of 1/256 is summed apart: its sums stay below 2^24 / 256 and are exact.
    """
    g = jnp.maximum(g, -128.0)  # exp(-128) is zero in float32
    coarse = jnp.round(g * 256.0) / 256.0
    return jnp.cumsum(coarse, axis=-1), jnp.cumsum(g - coarse, axis=-1)


def _difference(later: Float[Array, "... i"], earlier: Float[Array, "... j"]) -> Array:
    return later[..., :, None] - earlier[..., None, :]
