"""Up to 64 rows: integer codes on tensor cores, the scale on each group's sum.

Four units are multiplied at a time. Where they are several groups, each row of inputs is several
rows, one for each group, that are zero elsewhere: so that groups have sums of their own.

With one or two warps, threads multiply what they decoded themselves, and codes never go through
shared memory in bfloat16. An instruction of the tensor cores takes 16 inputs of 16 outputs, and
each of its threads brings four inputs of two outputs that are eight apart. In which order inputs
are summed is free, so the four threads of an output take a unit each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float

from .._compat import dot
from . import uncoded
from .config import BLOCK_UNITS, SomeRows
from .layout import UNIT
from .operands import Shape, above_zero, iota, per_group, words, x_tile
from .pieces import Piece, Share, launch
from .unit import centred, step

BLOCK = BLOCK_UNITS * UNIT


def products(
    x: Float[Array, "M I"], pieces: Sequence[Piece], configs: Sequence[SomeRows]
) -> tuple[Float[Array, "M _O"], ...]:
    """See `api.dequant_matmul`; warps, stages and splits are the same in all configurations."""
    splits, rows = configs[0].splits, configs[0].rows
    shapes = [piece.shape for piece in pieces]
    dtypes = [shape.dtype if splits == 1 else jnp.float32 for shape in shapes]

    def body(shares: Sequence[Share], index: int, ids: Any, x_ref: Any) -> None:
        [share] = shares
        shape, first, config, (row_tile, split) = share.shape, share.first, configs[index], ids
        first_row = row_tile * rows
        steps = pl.cdiv(shape.units, config.units)
        count = pl.cdiv(steps, splits)
        part = split * count, jnp.minimum(count, steps - split * count)
        add = _product if pieces[index].coded else uncoded.some_rows
        total = add(shape, config, first, first_row, part, x_ref, *share.refs)
        tile = config.outputs, rows
        output, row = first + iota(tile, 0), first_row + iota(tile, 1)
        plt.store(
            share.out_ref.at[jnp.full(row.shape, split, jnp.int32), row, output],
            total.astype(dtypes[index]),
            mask=(row < shape.rows) & (output < shape.outputs),
        )

    parts = launch(
        body,
        x,
        pieces,
        [config.outputs for config in configs],
        [
            jax.ShapeDtypeStruct((splits, shape.rows, shape.outputs), dtype)
            for shape, dtype in zip(shapes, dtypes, strict=True)
        ],
        alike=range(len(pieces)),
        grid=(pl.cdiv(x.shape[0], rows), splits),
        num_warps=configs[0].num_warps,
        num_stages=configs[0].num_stages,
        name="dequant_matmul_some_rows",
    )
    if splits == 1:
        return tuple(part[0] for part in parts)
    return tuple(
        jnp.sum(part, axis=0).astype(shape.dtype) for part, shape in zip(parts, shapes, strict=True)
    )


def _product(
    shape: Shape,
    config: SomeRows,
    first: Any,
    first_row: Any,
    steps: tuple[Any, Any],
    x_ref: Any,
    codes_ref: Any,
    scale_ref: Any,
    zero_ref: Any = None,
) -> Float[Array, "o m"]:
    """Sums of one program over a range of units.

    Args:
        shape: of the piece.
        config: see there.
        first: output of the program.
        first_row: row of it.
        steps: first iteration and number of them, of `config.units` units each.
        x_ref: rows.
        codes_ref: words.
        scale_ref: scales.
        zero_ref: zero points.
    """
    # Outputs first: then what is decoded is multiplied as it lies in registers.
    tile = config.outputs, config.rows
    ones = jnp.ones((tile[0], BLOCK), jnp.bfloat16)

    def add(index: Array, total: Float[Array, "o m"]) -> Float[Array, "o m"]:
        for block in range(config.blocks):
            start = (steps[0] + index) * config.units + block * BLOCK_UNITS
            codes = _codes(shape, config, codes_ref, first, start)
            part = _inputs(shape, config, x_ref, first_row, start)
            products = dot(codes, part.T)
            sums = None if zero_ref is None else dot(ones, part.T)
            total = total + _scaled(
                shape, config, products, sums, first, start, scale_ref, zero_ref
            )
        return total

    return jax.lax.fori_loop(0, steps[1], add, jnp.zeros(tile, jnp.float32))


def _codes(
    shape: Shape, config: SomeRows, codes_ref: Any, first: Any, start: Any
) -> Float[Array, "o i"]:
    """A block of codes from their centre.

    Args:
        shape: of the call.
        config: see there.
        codes_ref: words.
        first: output of the program.
        start: unit of the block.
    """
    block = config.outputs, BLOCK_UNITS
    output, unit = iota(block, 0), start + iota(block, 1)
    warps = config.num_warps
    if config.in_turns:
        # Warps share what is read eight by eight; tensor cores take 16 of a warp.
        warp, pair = output // 8 % warps, output // (8 * warps) % 2
        output = output // (16 * warps) * (16 * warps) + warp * 16 + pair * 8 + output % 8
    output = first + output
    mask = shape.mask((config.outputs, config.units), output, unit)
    codes = centred(words(shape, codes_ref, output, unit, mask))
    if config.in_turns:
        codes = codes.reshape(-1, 2, warps, 8, BLOCK_UNITS, UNIT // 4, 2, 2)
        codes = codes.transpose(0, 2, 1, 3, 5, 6, 4, 7).reshape(config.outputs, BLOCK)
    return codes


def _inputs(
    shape: Shape, config: SomeRows, x_ref: Any, first_row: Any, start: Any
) -> Float[Array, "gm i"]:
    """The inputs of a block, for each of its groups those of all rows.

    Args:
        shape: of the call.
        config: see there.
        x_ref: rows.
        first_row: of the program.
        start: unit of the block.
    """
    groups = BLOCK_UNITS // shape.group_units
    size = groups * config.rows, BLOCK
    row = first_row + jax.lax.iota(jnp.int32, size[0]) % config.rows
    read = None
    if groups > 1:
        # Not `//`, from which the compiler does not see that neighbours are read together.
        group, index = jax.lax.div(iota(size, 0), config.rows), iota(size, 1)
        read = jax.lax.div(index, shape.group_units * UNIT) == group
    if shape.units % config.units:
        # The last blocks of an iteration may lie behind the inputs, where other rows are.
        inside = start * UNIT + iota(size, 1) < shape.inputs
        read = inside if read is None else read & inside
    x = x_tile(shape, x_ref, row, start * UNIT, BLOCK, read)
    if config.in_turns:
        parts = x.reshape(size[0], BLOCK_UNITS, UNIT // 4, 2, 2)
        x = parts.transpose(0, 2, 3, 1, 4).reshape(size)
    return x


def _scaled(
    shape: Shape,
    config: SomeRows,
    products: Float[Array, "o gm"],
    sums: Float[Array, "o gm"] | None,
    first: Any,
    start: Any,
    scale_ref: Any,
    zero_ref: Any,
) -> Float[Array, "o m"]:
    """Products with the numbers of a block.

    Args:
        shape: of the call.
        config: see there.
        products: with its codes from their centre.
        sums: of inputs, where there are zero points.
        first: output of the program.
        start: unit of the block.
        scale_ref: scales.
        zero_ref: zero points.
    """
    size = config.outputs, BLOCK_UNITS // shape.group_units
    output, unit = first + iota(size, 0), start + iota(size, 1) * shape.group_units
    mask = shape.mask((config.outputs, config.units), output, unit)
    at = output, unit // shape.group_units, mask

    def spread(numbers: Float[Array, "o g"]) -> Float[Array, "o gm"]:
        wide = jnp.broadcast_to(numbers[:, :, None], (*size, config.rows))
        return wide.reshape(products.shape)

    factor = step(shape.bits)
    if sums is not None:
        above = above_zero(shape, zero_ref, *at)
        products, factor = products * factor + spread(above) * sums, 1.0
    products = products * spread(per_group(scale_ref, *at) * factor)
    if size[1] > 1:
        products = jnp.sum(products.reshape(*size, config.rows), axis=1)
    return products
