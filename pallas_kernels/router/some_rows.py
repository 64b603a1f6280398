"""Logits of some rows: on tensor cores, in bfloat16, and yet with the accuracy of float32.

A float32 number is exactly the sum of three bfloat16 numbers, its first, middle and last eight bits
(but for bits below 2^-133), and a product of two bfloat16 numbers is exact in float32. So three
products with parts of x are one with x, of which nothing but the sum is rounded.

Tensor cores cut off what does not fit into a sum where other units round it, so that errors add up
one way. They therefore add 64 columns at most, in at most eight steps that lose less than 2^-20 of
the greatest number each, and sums of these are added in float32, which keeps what it rounds off.
Errors of up to 4,096 columns are below 2^-16 of the sum of the products' sizes; one after the other
in float32, the bound is 2^-13 for half as many.

An infinite number, or sums too large for float32, make NaN of logits that would be infinite there.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from .._compat import dot, multiply_add, triton_call
from .config import PIECE, SomeRows

# The bits of a float32 number that bfloat16 has.
KEPT = -(2**16)


def product(
    x: Float[Array, "M D"], weight: Float[Array, "E D"], config: SomeRows
) -> Float[Array, "P M E"]:
    """Logits of parts of the columns, which are to be added.

    Args:
        x: float32 or bfloat16.
        weight: bfloat16.
        config: see there.
    """
    (rows, width), experts = x.shape, weight.shape[0]
    pieces = pl.cdiv(width, PIECE)
    each = pl.cdiv(pieces, config.parts)

    def kernel(x_ref: Any, weight_ref: Any, out_ref: Any) -> None:
        row = pl.program_id(0) * config.rows + jax.lax.iota(jnp.int32, config.rows)
        expert = pl.program_id(1) * config.experts + jax.lax.iota(jnp.int32, config.experts)
        start = pl.program_id(2) * each

        def add(piece: Any, sums: tuple[Array, Array]) -> tuple[Array, Array]:
            column = (start + piece) * PIECE
            return _added(*sums, _read(weight_ref, expert, column), _read(x_ref, row, column))

        zero = jnp.zeros((config.experts, config.rows), jnp.float32)
        # The compiler would make a long program of some loops whose length it knew.
        count = jnp.minimum(each, pieces - start)
        total, small = jax.lax.fori_loop(0, count, add, (zero, zero))
        _store(out_ref, row, expert, (total + small).T)

    return triton_call(
        kernel,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        name="router_parts",
        grid=(pl.cdiv(rows, config.rows), pl.cdiv(experts, config.experts), config.parts),
        out_shape=jax.ShapeDtypeStruct((config.parts, rows, experts), jnp.float32),
    )(x, weight)


def _read(ref: Any, index: Int[Array, " n"], column: Any) -> Float[Array, "n c"]:
    """Numbers of a piece; zero where there is no such column, anything where no such row."""
    tile, (size, width) = (index.shape[0], PIECE), ref.shape
    columns = column + jax.lax.broadcasted_iota(jnp.int32, tile, 1)
    if size % tile[0]:
        index = jnp.minimum(index, size - 1)
    mask = columns < width if width % PIECE else None
    at = jnp.broadcast_to(index[:, None], tile), columns
    return plt.load(ref.at[at], mask=mask, other=None if mask is None else 0)


def _store(
    out_ref: Any, row: Int[Array, " m"], expert: Int[Array, " e"], total: Float[Array, "m e"]
) -> None:
    """Write what a program added, as far as there are such rows and experts."""
    tile, (_, rows, experts) = total.shape, out_ref.shape
    at = jnp.broadcast_to(row[:, None], tile), jnp.broadcast_to(expert[None], tile)
    exists = None
    if rows % tile[0] or experts % tile[1]:
        exists = (at[0] < rows) & (at[1] < experts)
    part = jnp.full(tile, pl.program_id(2), jnp.int32)
    plt.store(out_ref.at[part, *at], total, mask=exists)


def _added(
    total: Float[Array, "e m"],
    small: Float[Array, "e m"],
    weight: Float[Array, "e c"],
    x: Float[Array, "m c"],
) -> tuple[Array, Array]:
    """Both sums and the products of a piece: with first parts of x, and with the others.

    The others' are so small that what tensor cores cut off does not matter; with them goes what the
    addition rounds off, exactly where the piece's is the smaller number (Dekker's Fast2Sum).
    """
    first, *others = _parts(x)
    for part in reversed(others):
        small += dot(weight, part.T)
    piece = dot(weight, first.T)
    # An addition that tensor cores cannot take over.
    longer = multiply_add(piece, 1.0, total)
    return longer, small + (piece - (longer - total))


def _parts(x: Float[Array, "m c"]) -> list[Float[Array, "m c"]]:
    """Bfloat16 numbers that add up to x, the largest first.

    Bits are cut off and not rounded, since the greatest numbers would be infinite.
    """
    if x.dtype == jnp.bfloat16:
        return [x]
    found, rest = [], x
    for _ in range(2):
        first = _cut(rest)
        found.append(first.astype(jnp.bfloat16))
        rest -= first
    return [*found, rest.astype(jnp.bfloat16)]


def _cut(x: Float[Array, "m c"]) -> Float[Array, "m c"]:
    """The number without the bits that bfloat16 does not have."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32) & KEPT
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
