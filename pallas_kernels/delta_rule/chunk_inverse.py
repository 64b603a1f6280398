"""The inverse of each chunk's triangular system: one warp a matrix, in blocks of 16."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, BFloat16, Float, Int

from .._compat import triton_call
from .parts import split
from .rule import CHUNK

LEAF = 16  # the smallest matrix product on tensor cores

Dot = Callable[[Array, Array], Array]
Blocks = dict[tuple[int, int], Array]


def invert_chunks(
    system: Float[Array, "B M S c"],
    beta: Float[Array, "B M S"],
    lengths: Int[Array, " B"],
    *,
    dot: Dot,
    parts: int,
) -> BFloat16[Array, "n B M S c"]:
    """(I + A)^-1 diag(beta) of every chunk, in parts.

    Blocks of 16 on the diagonal are inverted row by row, then joined in pairs. Both are accurate
    where the powers of A are not: see triangular.py. Chunks behind a sequence's length are left
    alone.

    Args:
        system: strictly lower triangular A.
        beta: write strength.
        lengths: real tokens of each sequence.
        dot: matrix product in the kernel.
        parts: how many parts of the result; see `parts.split`.
    """
    batch, heads, tokens, _ = system.shape

    def kernel(*refs: Any) -> None:
        system, beta, lengths, solution = refs
        item, number = pl.program_id(0), pl.program_id(1)
        row, head = item // heads, item % heads
        top = number * CHUNK

        def rows(block: int) -> Any:
            return pl.ds(top + block * LEAF, LEAF)

        def columns(block: int) -> Any:
            return pl.ds(block * LEAF, LEAF)

        count = CHUNK // LEAF
        line = jax.lax.broadcasted_iota(jnp.int32, (LEAF, LEAF), 0)
        column = jax.lax.broadcasted_iota(jnp.int32, (LEAF, LEAF), 1)

        def substitute(number: Array, leaves: tuple[Array, ...]) -> tuple[Array, ...]:
            """One more line of the inverse of each block on the diagonal."""

            def next_line(block: int, leaf: Array) -> Array:
                weights = system[row, head, top + block * LEAF + number, columns(block)]
                above = jnp.sum(weights[:, None] * leaf, axis=0)
                return jnp.where(line == number, leaf - above[None, :], leaf)

            return tuple(next_line(block, leaf) for block, leaf in enumerate(leaves))

        @pl.when(top < lengths[row])
        def _() -> None:
            below = {
                (i, j): system[row, head, rows(i), columns(j)]
                for i in range(count)
                for j in range(i)
            }
            leaves = tuple(jnp.where(line == column, 1.0, 0.0) for _ in range(count))
            leaves = jax.lax.fori_loop(1, LEAF, substitute, leaves)
            inverse: Blocks = {(block, block): leaf for block, leaf in enumerate(leaves)}
            size = 1
            while size < count:
                for first in range(0, count, 2 * size):
                    _join(inverse, below, first, size, dot)
                size *= 2
            for i in range(count):
                for j in range(count):
                    block = inverse.get((i, j), jnp.zeros((LEAF, LEAF), jnp.float32))
                    scale = beta[row, head, rows(j)][None, :]
                    for part, value in enumerate(split(block * scale, parts)):
                        solution[part, row, head, rows(i), columns(j)] = value

    return triton_call(
        kernel,
        num_warps=1,
        num_stages=1,
        name="delta_rule_inverse",
        grid=(batch * heads, tokens // CHUNK),
        out_shape=jax.ShapeDtypeStruct((parts, *system.shape), jnp.bfloat16),
    )(system, beta, lengths)


def _join(inverse: Blocks, below: Blocks, first: int, size: int, dot: Dot) -> None:
    """From the inverses of two diagonal parts that of the whole.

    With L and R the inverses of the upper left and lower right part, and E what A has below, the
    corner of the whole is -R E L. All three are `size` blocks of 16 wide.
    """
    upper, lower = range(first, first + size), range(first + size, first + 2 * size)
    right = {
        (i, j): _sum([dot(below[i, m], inverse[m, j]) for m in upper if m >= j])
        for i in lower
        for j in upper
    }
    for i in lower:
        for j in upper:
            inverse[i, j] = -_sum([dot(inverse[i, m], right[m, j]) for m in lower if m <= i])


def _sum(terms: list[Array]) -> Array:
    total = terms[0]
    for term in terms[1:]:
        total += term
    return total
