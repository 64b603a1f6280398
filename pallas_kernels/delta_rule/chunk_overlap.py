"""What the tokens of a chunk say about one another: decays, overlaps of keys, attention to keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from .._compat import triton_call
from .rule import CHUNK

Dot = Callable[[Array, Array], Array]

SLAB = 32


class Overlap(NamedTuple):
    """Float32, for every value head; c is a position in the chunk.

    Attributes:
        system: A, strictly lower triangular: beta_i exp(g_i - g_j) k_i . k_j.
        attention: of read-out i to what token j writes: exp(g_i - g_j) q_i . k_j, diagonal
            included.
        beta: write strength.
        coarse: running sum of the log decays in the chunk, first part; see `rule`.
        fine: second part.
    """

    system: Float[Array, "B M S c"]
    attention: Float[Array, "B M S c"]
    beta: Float[Array, "B M S"]
    coarse: Float[Array, "B M S"]
    fine: Float[Array, "B M S"]


def overlap_chunks(
    qk: Float[Array, "B 2 K S Q"],
    b: Float[Array, "B T M"],
    a: Float[Array, "B T M"],
    a_log: Float[Array, " M"],
    dt_bias: Float[Array, " M"],
    lengths: Int[Array, " B"],
    *,
    dot: Dot,
    exact_dot: Dot,
) -> Overlap:
    """Gates of all tokens and the triangular matrices of all chunks, at once.

    Products of queries and keys are taken once a key head, and decayed for each value head that
    shares it. Chunks behind a sequence's length are left alone, whatever their memory holds.

    Args:
        qk: float32 queries, scaled, and keys; S is a multiple of the chunk.
        b: logits of beta.
        a: input of the decay.
        a_log: see `api.gated_delta_rule`.
        dt_bias: see `api.gated_delta_rule`.
        lengths: real tokens of each sequence.
        dot: matrix product in the kernel, for the attention.
        exact_dot: the same for the system, whose inverse amplifies roundings.
    """
    batch, _, key_heads, tokens, key_width = qk.shape
    heads = b.shape[2]
    shared, slab = heads // key_heads, min(SLAB, key_width)

    def kernel(*refs: Any) -> None:
        qk, b, a, a_log, dt_bias, lengths, system, attention, beta, coarse, fine = refs
        item, number = pl.program_id(0), pl.program_id(1)
        row, key_head = item // key_heads, item % key_heads
        rows = pl.ds(number * CHUNK, CHUNK)
        token = number * CHUNK + jax.lax.iota(jnp.int32, CHUNK)
        real = token < lengths[row]

        def gates(head: Array) -> tuple[Array, Array, Array]:
            """Write strength and log decay, the latter's running sum in two parts."""
            b_now = plt.load(b.at[row, token, head], mask=real, other=0.0)
            a_now = plt.load(a.at[row, token, head], mask=real, other=0.0)
            step = jax.nn.softplus(a_now.astype(jnp.float32) + dt_bias[head])
            # As in `rule`: sums of multiples of 1/256 are exact.
            g = jnp.where(real, jnp.maximum(-jnp.exp(a_log[head]) * step, -128.0), 0.0)
            part = jnp.floor(g * 256.0 + 0.5) / 256.0
            strength = jnp.where(real, jax.lax.logistic(b_now.astype(jnp.float32)), 0.0)
            return strength, jnp.cumsum(part), jnp.cumsum(g - part)

        def overlap(part: Array, sums: tuple[Array, Array]) -> tuple[Array, Array]:
            columns = pl.ds(part * slab, slab)
            q, k = qk[row, 0, key_head, rows, columns], qk[row, 1, key_head, rows, columns]
            return sums[0] + dot(q, k.T), sums[1] + exact_dot(k, k.T)

        @pl.when(number * CHUNK < lengths[row])
        def _() -> None:
            zeros = jnp.zeros((CHUNK, CHUNK), jnp.float32)
            to_keys, of_keys = jax.lax.fori_loop(0, key_width // slab, overlap, (zeros, zeros))
            later = jax.lax.broadcasted_iota(jnp.int32, zeros.shape, 0)
            earlier = jax.lax.broadcasted_iota(jnp.int32, zeros.shape, 1)

            def value_head(index: Array, _: None) -> None:
                head = key_head * shared + index
                strength, first, second = gates(head)
                beta[row, head, rows] = strength
                coarse[row, head, rows] = first
                fine[row, head, rows] = second
                gap = (first[:, None] - first[None, :]) + (second[:, None] - second[None, :])
                decay = jnp.exp(jnp.where(later >= earlier, gap, -jnp.inf))
                attention[row, head, rows, :] = to_keys * decay
                strict = jnp.where(later > earlier, of_keys * decay, 0.0)
                system[row, head, rows, :] = strict * strength[:, None]

            jax.lax.fori_loop(0, shared, value_head, None)

    matrices = jax.ShapeDtypeStruct((batch, heads, tokens, CHUNK), jnp.float32)
    vectors = jax.ShapeDtypeStruct((batch, heads, tokens), jnp.float32)
    out = triton_call(
        kernel,
        num_warps=4,
        num_stages=2,
        name="delta_rule_overlap",
        grid=(batch * key_heads, tokens // CHUNK),
        out_shape=(matrices, matrices, vectors, vectors, vectors),
    )(qk, b, a, a_log, dt_bias, lengths)
    return Overlap(*out)
