"""Many rows, the other way: the matrix is made in bfloat16, and XLA multiplies.

Making it costs what reading codes and writing bfloat16 costs, once however many rows there are, and
XLA's product is faster than one whose weights are decoded for every tile of rows. Large matrices
are made part by part, so that no more than `PART_BYTES` are in bfloat16 at a time.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from .._compat import triton_call
from .config import Unpacked
from .operands import Shape, above_zero, inputs_of, iota, stored, words
from .pieces import Piece
from .unit import numbers

PART_BYTES = 1 << 26


def product(x: Float[Array, "M I"], piece: Piece, config: Unpacked) -> Float[Array, "M O"]:
    """See `api.dequant_matmul`."""
    shape = piece.shape
    count = _outputs_of_a_part(shape, config)

    def part(first: Int[Array, ""]) -> Float[Array, "M o"]:
        weight = matrix(piece, first, count, config)
        return jnp.einsum("mi,oi->mo", x, weight, preferred_element_type=shape.dtype)

    if count == shape.outputs:
        return part(jnp.int32(0))

    def add(index: Array, y: Float[Array, "M O"]) -> Float[Array, "M O"]:
        # The last part begins early enough to be a whole one.
        first = jnp.minimum(index * count, shape.outputs - count)
        return jax.lax.dynamic_update_slice_in_dim(y, part(first), first, axis=1)

    y = jnp.zeros((shape.rows, shape.outputs), shape.dtype)
    return jax.lax.fori_loop(0, pl.cdiv(shape.outputs, count), add, y)


def _outputs_of_a_part(shape: Shape, config: Unpacked) -> int:
    most = PART_BYTES // (2 * shape.inputs) // config.outputs * config.outputs
    return min(shape.outputs, max(config.outputs, most))


def matrix(
    piece: Piece, first: Int[Array, ""], count: int, config: Unpacked
) -> Float[Array, "o I"]:
    """Numbers of so many outputs from the first on, in bfloat16.

    Args:
        piece: codes of all outputs.
        first: output.
        count: of outputs.
        config: see there.
    """
    shape, arrays = piece.shape, piece.arrays
    block = config.outputs, config.units
    tile = config.outputs, inputs_of(config.units)

    def kernel(first_ref: Any, codes_ref: Any, scale_ref: Any, *refs: Any) -> None:
        row, unit = (
            pl.program_id(axis) * size + iota(block, axis) for axis, size in enumerate(block)
        )
        output, group = first_ref[()] + row, unit // shape.group_units
        mask = dataclasses.replace(shape, outputs=count).mask(block, row, unit)
        scales = stored(scale_ref, output, group, mask)
        offset = None
        if len(arrays) > 2:
            offset = above_zero(shape, refs[0], output, group, mask) * scales.astype(jnp.float32)
        weights = numbers(words(shape, codes_ref, output, unit, mask), scales, offset)
        rows = pl.program_id(0) * tile[0] + iota(tile, 0)
        columns = pl.program_id(1) * tile[1] + iota(tile, 1)
        inside = None
        if count % tile[0]:
            inside = rows < count
        if shape.inputs % tile[1]:
            exists = columns < shape.inputs
            inside = exists if inside is None else inside & exists
        plt.store(refs[-1].at[rows, columns], weights, mask=inside)

    return triton_call(
        kernel,
        num_warps=config.num_warps,
        num_stages=1,
        name="dequant_matmul_unpack",
        grid=(pl.cdiv(count, block[0]), pl.cdiv(shape.units, block[1])),
        out_shape=jax.ShapeDtypeStruct((count, shape.inputs), jnp.bfloat16),
    )(first, *arrays)
