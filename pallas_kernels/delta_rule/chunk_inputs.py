"""Convolution, SiLU and L2 norms of all new tokens: what the chunks are computed from."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, BFloat16, Float, Int

from .._compat import triton_call
from .parts import split

ROWS = 32


class Inputs(NamedTuple):
    """Of each token, by head; S tokens, of which padding is zero. Parts are those of `parts.split`.

    Attributes:
        queries: with L2 norm Q^-0.5.
        keys: with L2 norm 1.
        values: float32, tokens last.
    """

    queries: BFloat16[Array, "n B K S Q"]
    keys: BFloat16[Array, "n B K S Q"]
    values: Float[Array, "B M R S"]


def convolve_chunks(
    qkv: Float[Array, "B T C"],
    conv_weight: Float[Array, "C W"],
    conv_state: Float[Array, "B C W"],
    start: Int[Array, " B"],
    lengths: Int[Array, " B"],
    *,
    tokens: int,
    heads: int,
    key_width: int,
    value_width: int,
    parts: int,
) -> Inputs:
    """Queries, keys and values.

    One program computes 32 tokens of one head. The convolution's state is only read here.

    Args:
        qkv: projected inputs; padding may hold anything.
        conv_weight: depthwise taps, the last of which meets the current token.
        conv_state: ring of the inputs before.
        start: tokens that each sequence has seen before.
        lengths: real tokens of each sequence.
        tokens: S, T or more, a multiple of 32.
        heads: value heads, M.
        key_width: Q.
        value_width: R.
        parts: how many parts queries and keys are split into.
    """
    batch, _, channels = qkv.shape
    taps = conv_weight.shape[1]
    key_heads = (channels - heads * value_width) // (2 * key_width)

    def kernel(*refs: Any) -> None:
        qkv, conv_weight, ring, start, lengths, queries, keys, values = refs
        number, item, row = pl.program_id(0), pl.program_id(1), pl.program_id(2)
        rows = pl.ds(number * ROWS, ROWS)

        def convolved(first: Array, width: int) -> Float[Array, "r width"]:
            token = number * ROWS + jax.lax.broadcasted_iota(jnp.int32, (ROWS, width), 0)
            channel = first + jax.lax.broadcasted_iota(jnp.int32, (ROWS, width), 1)
            real = token < lengths[row]

            weights = [conv_weight[pl.ds(first, width), tap] for tap in range(taps)]
            weights = [weight.astype(jnp.float32)[None, :] for weight in weights]

            def new(distance: int) -> Array:
                """Inputs of this call `distance` tokens ago, under their tap."""
                line, known = jnp.maximum(token - distance, 0), real & (token >= distance)
                x = plt.load(qkv.at[row, line, channel], mask=known, other=0.0)
                return x.astype(jnp.float32) * weights[-1 - distance]

            def old(distance: int) -> Array:
                """The same of inputs before this call; zero before the sequence's beginning."""
                position = start[row] + token - distance
                known = real & (token < distance) & (position >= 0)
                column = (position + taps) % taps
                x = plt.load(ring.at[row, channel, column], mask=known, other=0.0)
                return x.astype(jnp.float32) * weights[-1 - distance]

            total = sum(new(distance) for distance in range(taps))
            if taps > 1:
                total = jax.lax.cond(
                    number == 0,
                    lambda: total + sum(old(distance) for distance in range(1, taps)),
                    lambda: total,
                )
            return total * jax.lax.logistic(total)

        @pl.when(item < 2 * key_heads)
        def _() -> None:
            x = convolved(item * key_width, key_width)
            x *= jax.lax.rsqrt(jnp.sum(x * x, axis=1) + 1e-6)[:, None]

            @pl.when(item < key_heads)
            def _() -> None:
                for part, value in enumerate(split(x * key_width**-0.5, parts)):
                    queries[part, row, item, rows, :] = value

            @pl.when(item >= key_heads)
            def _() -> None:
                for part, value in enumerate(split(x, parts)):
                    keys[part, row, item - key_heads, rows, :] = value

        @pl.when(item >= 2 * key_heads)
        def _() -> None:
            head = item - 2 * key_heads
            first = 2 * key_heads * key_width + head * value_width
            values[row, head, :, rows] = convolved(first, value_width).T

    head_parts = jax.ShapeDtypeStruct((parts, batch, key_heads, tokens, key_width), jnp.bfloat16)
    out = triton_call(
        kernel,
        num_warps=4,
        num_stages=1,
        name="delta_rule_inputs",
        grid=(tokens // ROWS, 2 * key_heads + heads, batch),
        out_shape=(
            head_parts,
            head_parts,
            jax.ShapeDtypeStruct((batch, heads, value_width, tokens), jnp.float32),
        ),
    )(qkv, conv_weight, conv_state, start, lengths)
    return Inputs(*out)
