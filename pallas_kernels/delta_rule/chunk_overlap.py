"""What the tokens of a chunk say about one another: decays, overlaps of keys, attention to keys."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, BFloat16, Float, Int

from .._compat import triton_call
from .parts import product, split
from .rule import CHUNK


class Overlap(NamedTuple):
    """For every value head; c is a position in the chunk.

    Attributes:
        system: A, strictly lower triangular: beta_i exp(g_i - g_j) k_i . k_j.
        attention: of read-out i to what token j writes: exp(g_i - g_j) q_i . k_j, diagonal
            included; in parts.
        beta: write strength.
        since: decay of the state from before the chunk to each token, that token's included.
        until: decay from behind each token to the end of its chunk.
    """

    system: Float[Array, "B M S c"]
    attention: BFloat16[Array, "n B M S c"]
    beta: Float[Array, "B M S"]
    since: Float[Array, "B M S"]
    until: Float[Array, "B M S"]


def overlap_chunks(
    queries: BFloat16[Array, "n B K S Q"],
    keys: BFloat16[Array, "n B K S Q"],
    b: Float[Array, "B T M"],
    a: Float[Array, "B T M"],
    a_log: Float[Array, " M"],
    dt_bias: Float[Array, " M"],
    lengths: Int[Array, " B"],
) -> Overlap:
    """Gates of all tokens and the triangular matrices of all chunks, at once.

    Products of queries and keys are taken once a key head, and decayed for each value head that
    shares it. Chunks behind a sequence's length are left alone, whatever their memory holds.

    Args:
        queries: of `Inputs`; S is a multiple of the chunk.
        keys: of `Inputs`.
        b: logits of beta.
        a: input of the decay.
        a_log: see `api.gated_delta_rule`.
        dt_bias: see `api.gated_delta_rule`.
        lengths: real tokens of each sequence.
    """
    parts, batch, key_heads, tokens, _ = keys.shape
    heads = b.shape[2]
    shared = heads // key_heads

    def kernel(*refs: Any) -> None:
        queries, keys, b, a, a_log, dt_bias, lengths = refs[:7]
        system, attention, beta, since, until = refs[7:]
        item, number = pl.program_id(0), pl.program_id(1)
        row, key_head = item // key_heads, item % key_heads
        rows = pl.ds(number * CHUNK, CHUNK)
        token = number * CHUNK + jax.lax.iota(jnp.int32, CHUNK)
        real = token < lengths[row]

        def gates(head: Array) -> tuple[Array, tuple[Array, Array], tuple[Array, Array]]:
            """Write strength; and of the log decay, in two parts, running sum and sum."""
            b_now = plt.load(b.at[row, token, head], mask=real, other=0.0)
            a_now = plt.load(a.at[row, token, head], mask=real, other=0.0)
            step = jax.nn.softplus(a_now.astype(jnp.float32) + dt_bias[head])
            # As in `rule`: sums of multiples of 1/256 are exact.
            g = jnp.where(real, jnp.maximum(-jnp.exp(a_log[head]) * step, -128.0), 0.0)
            part = jnp.floor(g * 256.0 + 0.5) / 256.0
            strength = jnp.where(real, jax.lax.logistic(b_now.astype(jnp.float32)), 0.0)
            coarse, fine = ((jnp.cumsum(x), jnp.sum(x)) for x in (part, g - part))
            return strength, coarse, fine

        @pl.when(number * CHUNK < lengths[row])
        def _() -> None:
            q = [queries[part, row, key_head, rows, :] for part in range(parts)]
            k = [keys[part, row, key_head, rows, :] for part in range(parts)]
            transposed = [x.T for x in k]
            to_keys, of_keys = product(q, transposed), product(k, transposed)
            later = jax.lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), 0)
            earlier = jax.lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), 1)

            def value_head(index: Array, _: None) -> None:
                head = key_head * shared + index
                strength, (first, first_sum), (second, second_sum) = gates(head)
                beta[row, head, rows] = strength
                since[row, head, rows] = jnp.exp(first + second)
                until[row, head, rows] = jnp.exp((first_sum - first) + (second_sum - second))
                gap = (first[:, None] - first[None, :]) + (second[:, None] - second[None, :])
                decay = jnp.exp(jnp.where(later >= earlier, gap, -jnp.inf))
                for part, value in enumerate(split(to_keys * decay, parts)):
                    attention[part, row, head, rows, :] = value
                strict = jnp.where(later > earlier, of_keys * decay, 0.0)
                system[row, head, rows, :] = strict * strength[:, None]

            jax.lax.fori_loop(0, shared, value_head, None)

    matrices = jax.ShapeDtypeStruct((batch, heads, tokens, CHUNK), jnp.float32)
    attention = jax.ShapeDtypeStruct((parts, *matrices.shape), jnp.bfloat16)
    vectors = jax.ShapeDtypeStruct((batch, heads, tokens), jnp.float32)
    out = triton_call(
        kernel,
        num_warps=4,
        num_stages=1,
        name="delta_rule_overlap",
        grid=(batch * key_heads, tokens // CHUNK),
        out_shape=(matrices, attention, vectors, vectors, vectors),
    )(queries, keys, b, a, a_log, dt_bias, lengths)
    return Overlap(*out)
