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
from .layout import UNIT
from .operands import Shape, above_zero, iota, per_group, words, x_tile
from .unit import centred, step

# Units that a thread reads at once: 16 bytes of each word's.
READ = 4


def product(
    shape: Shape,
    x: Float[Array, "M I"],
    codes: UInt[Array, "O words"],
    scale: Float[Array, "O J"],
    zero: Float[Array, "O J"] | None,
    config: SomeRows,
) -> Float[Array, "M O"]:
    """See `api.dequant_matmul`."""
    tile = config.rows, config.outputs
    reads = pl.cdiv(shape.units, READ)
    share = pl.cdiv(reads, config.splits)
    splits = pl.cdiv(reads, share)
    arrays = [x, codes, scale] + ([] if zero is None else [zero])
    dtype = shape.dtype if splits == 1 else jnp.float32

    def kernel(x_ref: Any, codes_ref: Any, scale_ref: Any, *refs: Any) -> None:
        zero_ref = None if zero is None else refs[0]
        split, block = pl.program_id(2), pl.program_id(0) * tile[1]
        row = pl.program_id(1) * tile[0] + jax.lax.iota(jnp.int32, tile[0])
        output = block + jax.lax.iota(jnp.int32, tile[1])
        exists = output < shape.outputs if shape.outputs % tile[1] else None

        def add(index: Array, total: Float[Array, "m o"]) -> Float[Array, "m o"]:
            units = _read(shape, codes_ref, block, index, tile[1])
            for first in range(0, READ, min(shape.group_units, READ)):
                group = (index * READ + first) // shape.group_units
                # Of units that do not exist, codes and x are zero, and so must this be finite.
                inside = _inside(shape, exists, group, tile[1])
                partial, sums = jnp.zeros(tile, jnp.float32), jnp.zeros(tile[0], jnp.float32)
                for unit in range(first, first + min(shape.group_units, READ)):
                    start = (index * READ + unit) * UNIT
                    part = x_tile(shape, x_ref, row, start, UNIT)
                    partial += dot(part, centred(units[unit]).T)
                    sums += jnp.sum(part.astype(jnp.float32), axis=1)
                factor = step(shape.bits)
                if zero_ref is not None:
                    above = above_zero(shape, zero_ref, output, group, inside)
                    partial = partial * factor + sums[:, None] * above[None, :]
                    factor = 1.0
                scales = per_group(scale_ref, output, group, inside) * factor
                total += partial * scales[None, :]
            return total

        stop = jnp.minimum((split + 1) * share, reads)
        total = jax.lax.fori_loop(split * share, stop, add, jnp.zeros(tile, jnp.float32))
        rows, columns = (
            jnp.broadcast_to(row[:, None], tile),
            jnp.broadcast_to(output[None, :], tile),
        )
        plt.store(
            refs[-1].at[split, rows, columns],
            total.astype(dtype),
            mask=(rows < shape.rows) & (columns < shape.outputs),
        )

    parts = triton_call(
        kernel,
        num_warps=config.num_warps,
        num_stages=1,
        name="dequant_matmul_some_rows",
        grid=(pl.cdiv(shape.outputs, tile[1]), pl.cdiv(shape.rows, tile[0]), splits),
        out_shape=jax.ShapeDtypeStruct((splits, shape.rows, shape.outputs), dtype),
    )(*arrays)
    return parts[0] if splits == 1 else jnp.sum(parts, axis=0).astype(shape.dtype)


def _inside(shape: Shape, exists: Array | None, group: Any, outputs: int) -> Array | None:
    """Which outputs have the group; None where all must."""
    groups = -(-shape.units // shape.group_units)
    if groups * shape.group_units % READ == 0 or shape.group_units >= READ:
        return exists
    real = jnp.broadcast_to(group < groups, (outputs,))
    return real if exists is None else real & exists


def _read(
    shape: Shape, codes_ref: Any, first: Any, index: Any, outputs: int
) -> list[list[UInt[Array, " o"]]]:
    """The words of `READ` units of each output, by unit; zero where there is none."""
    tile = outputs, READ
    output, unit = first + iota(tile, 0), index * READ + iota(tile, 1)
    units: list[list[Array]] = [[] for _ in range(READ)]
    for word in words(shape, codes_ref, output, unit, shape.mask(tile, output, unit)):
        # Values in registers cannot be indexed, but halved.
        halves = jnp.unstack(word.reshape(outputs, 2, 2), axis=-1)
        for odd, half in enumerate(halves):
            for high, quarter in enumerate(jnp.unstack(half, axis=-1)):
                units[2 * high + odd].append(quarter)
    return units
