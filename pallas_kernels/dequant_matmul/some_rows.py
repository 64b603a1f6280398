"""Up to 64 rows: integer codes on tensor cores, the scale on each group's sum."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, UInt

from .._compat import dot, triton_call
from .config import SomeRows
from .operands import Shape, above_zero, inputs_of, iota, per_group, words, x_tile
from .unit import centred, step


def product(
    shape: Shape,
    x: Float[Array, "M I"],
    codes: UInt[Array, "O words"],
    scale: Float[Array, "O J"],
    zero: Float[Array, "O J"] | None,
    config: SomeRows,
) -> Float[Array, "M O"]:
    """See `api.dequant_matmul`."""
    # Outputs first: then what is decoded is stored as it lies in registers.
    tile = config.outputs, config.rows
    block = config.outputs, shape.group_units
    width, groups = inputs_of(shape.group_units), pl.cdiv(shape.units, shape.group_units)
    share = pl.cdiv(groups, config.splits)
    splits = pl.cdiv(groups, share)
    arrays = [x, codes, scale] + ([] if zero is None else [zero])
    dtype = shape.dtype if splits == 1 else jnp.float32

    def kernel(x_ref: Any, codes_ref: Any, scale_ref: Any, *refs: Any) -> None:
        zero_ref = None if zero is None else refs[0]
        split, first = pl.program_id(2), pl.program_id(0) * tile[0]
        row = pl.program_id(1) * tile[1] + jax.lax.iota(jnp.int32, tile[1])
        output = first + jax.lax.iota(jnp.int32, tile[0])
        exists = output < shape.outputs if shape.outputs % tile[0] else None

        def add(group: Array, total: Float[Array, "o m"]) -> Float[Array, "o m"]:
            unit = group * block[1] + iota(block, 1)
            outputs = first + iota(block, 0)
            mask = shape.mask(block, outputs, unit)
            codes = centred(words(shape, codes_ref, outputs, unit, mask))
            part = x_tile(shape, x_ref, row, group * width, width)
            partial, factor = dot(codes, part.T), step(shape.bits)
            if zero_ref is not None:
                above = above_zero(shape, zero_ref, output, group, exists)
                sums = jnp.sum(part.astype(jnp.float32), axis=1)
                partial = partial * factor + above[:, None] * sums[None, :]
                factor = 1.0
            scales = per_group(scale_ref, output, group, exists) * factor
            return total + partial * scales[:, None]

        stop = jnp.minimum((split + 1) * share, groups)
        total = jax.lax.fori_loop(split * share, stop, add, jnp.zeros(tile, jnp.float32))
        rows, columns = (
            jnp.broadcast_to(row[None, :], tile),
            jnp.broadcast_to(output[:, None], tile),
        )
        plt.store(
            refs[-1].at[split, rows, columns],
            total.astype(dtype),
            mask=(rows < shape.rows) & (columns < shape.outputs),
        )

    parts = triton_call(
        kernel,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        name="dequant_matmul_some_rows",
        grid=(pl.cdiv(shape.outputs, tile[0]), pl.cdiv(shape.rows, tile[1]), splits),
        out_shape=jax.ShapeDtypeStruct((splits, shape.rows, shape.outputs), dtype),
    )(*arrays)
    return parts[0] if splits == 1 else jnp.sum(parts, axis=0).astype(shape.dtype)
