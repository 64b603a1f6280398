"""More than 64 rows: tiles of weights are made in bfloat16 and multiplied on tensor cores."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float

from .._compat import dot, triton_call
from .config import ManyRows
from .operands import above_zero, inputs_of, iota, stored, words, x_tile
from .pieces import Piece
from .unit import numbers


def product(x: Float[Array, "M I"], piece: Piece, config: ManyRows) -> Float[Array, "M O"]:
    """See `api.dequant_matmul`."""
    shape, tile = piece.shape, (config.rows, config.outputs)

    def kernel(x_ref: Any, codes_ref: Any, scale_ref: Any, *refs: Any) -> None:
        zero_ref = refs[0] if len(piece.arrays) > 2 else None
        # Programs that run together share a tile of weights, and the rows of x stay in the cache.
        row = pl.program_id(0) * tile[0] + jax.lax.iota(jnp.int32, tile[0])
        block = config.outputs, config.units
        output = pl.program_id(1) * tile[1] + iota(block, 0)

        def add(index: Array, total: Float[Array, "m o"]) -> Float[Array, "m o"]:
            unit = index * config.units + iota(block, 1)
            mask, group = shape.mask(block, output, unit), unit // shape.group_units
            scales = stored(scale_ref, output, group, mask)
            offset = None
            if zero_ref is not None:
                offset = above_zero(shape, zero_ref, output, group, mask) * scales.astype(
                    jnp.float32
                )
            weights = numbers(words(shape, codes_ref, output, unit, mask), scales, offset)
            start, width = index * inputs_of(config.units), inputs_of(config.units)
            return total + dot(x_tile(shape, x_ref, row, start, width), weights.T)

        count = pl.cdiv(shape.units, config.units)
        total = jax.lax.fori_loop(0, count, add, jnp.zeros(tile, jnp.float32))
        column = pl.program_id(1) * tile[1] + jax.lax.iota(jnp.int32, tile[1])
        rows, columns = (
            jnp.broadcast_to(row[:, None], tile),
            jnp.broadcast_to(column[None, :], tile),
        )
        plt.store(
            refs[-1].at[rows, columns],
            total.astype(shape.dtype),
            mask=(rows < shape.rows) & (columns < shape.outputs),
        )

    return triton_call(
        kernel,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        name="dequant_matmul_many_rows",
        grid=(pl.cdiv(shape.rows, tile[0]), pl.cdiv(shape.outputs, tile[1])),
        out_shape=jax.ShapeDtypeStruct((shape.rows, shape.outputs), shape.dtype),
    )(x, *piece.arrays)
