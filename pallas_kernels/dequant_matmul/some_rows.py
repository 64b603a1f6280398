"""Up to 64 rows: integer codes on tensor cores, the scale on each group's sum.

Threads multiply what they decoded themselves, and codes never go through shared memory in bfloat16:
see `turn`. The order that takes is x's beforehand. Put right while it is read, x would be read from
shared memory with conflicts that cost several times the product.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Bool, Float, UInt

from .._compat import dot
from ..lanes import parts
from . import uncoded
from .config import BLOCK_UNITS, SomeRows
from .layout import UNIT
from .operands import Shape, above_zero, iota, load, per_group
from .pairs import values
from .pieces import Piece, Share, launch
from .turn import THREADS, part_width, turned
from .unit import stacked


def products(
    x: Float[Array, "M I"], pieces: Sequence[Piece], configs: Sequence[SomeRows]
) -> tuple[Float[Array, "M _O"], ...]:
    """See `api.dequant_matmul`; all is the same in all configurations but `outputs`."""
    splits, rows = configs[0].splits, configs[0].rows
    shapes = [piece.shape for piece in pieces]
    dtypes = [shape.dtype if splits == 1 else jnp.float32 for shape in shapes]
    [width] = {part_width(p.shape.bits) for p in pieces if p.coded} or {UNIT}

    def body(shares: Sequence[Share], index: int, ids: Any, x_ref: Any, turned_ref: Any) -> None:
        [share] = shares
        shape, first, config, (row_tile, split) = share.shape, share.first, configs[index], ids
        first_row = row_tile * rows
        count = pl.cdiv(pl.cdiv(shape.units, config.units), splits)
        steps = split * count, jnp.minimum((split + 1) * count, pl.cdiv(shape.units, config.units))
        add, ref = (_product, turned_ref) if pieces[index].coded else (uncoded.some_rows, x_ref)
        total = add(shape, config, first, first_row, steps, ref, *share.refs)
        tile = config.outputs, rows
        output, row = first + iota(tile, 0), first_row + iota(tile, 1)
        plt.store(
            share.out_ref.at[jnp.full(row.shape, split, jnp.int32), row, output],
            total.astype(dtypes[index]),
            mask=(row < shape.rows) & (output < shape.outputs),
        )

    results = launch(
        body,
        (x, turned(x, configs[0].units, width)),
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
        return tuple(result[0] for result in results)
    return tuple(
        jnp.sum(result, axis=0).astype(shape.dtype)
        for result, shape in zip(results, shapes, strict=True)
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
        steps: first iteration and the one after the last, of `config.units` units each.
        x_ref: rows, turned.
        codes_ref: words.
        scale_ref: scales.
        zero_ref: zero points.
    """
    # Outputs first: then what is decoded is multiplied as it lies in registers.
    tile = config.outputs, config.rows
    output = first + jax.lax.iota(jnp.int32, tile[0])
    inside = output < shape.outputs if shape.outputs % tile[0] else None

    def add(index: Array, total: Float[Array, "o m"]) -> Float[Array, "o m"]:
        for block in range(config.blocks):
            start = index * config.units + block * BLOCK_UNITS
            made = _codes(shape, config, codes_ref, first, start)
            for place, (unit, codes) in enumerate(made):
                x = _inputs(shape, config, x_ref, first_row, start + unit, codes.shape[1])
                first_unit = start + place * shape.group_units
                mask = inside
                if shape.units % config.units:
                    exists = jnp.broadcast_to(first_unit < shape.units, output.shape)
                    mask = exists if mask is None else mask & exists
                at = output, first_unit // shape.group_units, mask
                products = dot(codes, x.T)
                if zero_ref is not None:
                    sums = dot(_ones(codes, place, shape.group_units), x.T)
                    products = products + above_zero(shape, zero_ref, *at)[:, None] * sums
                total = total + products * per_group(scale_ref, *at)[:, None]
        return total

    return jax.lax.fori_loop(*steps, add, jnp.zeros(tile, jnp.float32))


def _codes(
    shape: Shape, config: SomeRows, codes_ref: Any, first: Any, start: Any
) -> list[tuple[int, Float[Array, "o i"]]]:
    """For each group of a block: the first unit of the inputs that it meets, and its codes.

    Args:
        shape: of the call.
        config: see there.
        codes_ref: words.
        first: output of the program.
        start: unit of the block.
    """
    units = min(shape.group_units, BLOCK_UNITS)
    firsts = range(0, BLOCK_UNITS, units)
    read = functools.partial(_words, shape, config, codes_ref, first, start)
    if shape.bits == 3:
        words = [read(word)[..., None] for word in range(3)]
        if len(firsts) == 1:
            return [(0, _in_order(words, config, 3))]
        # All of them meet the same inputs: a thread has one unit, which is in one of the groups.
        group = jax.lax.div(iota(words[0].shape, 1), units)
        return [(0, _in_order(words, config, 3, group == index)) for index in range(len(firsts))]
    words = [parts(read(word)) for word in range(shape.bits // THREADS)]
    made = []
    for unit in firsts:
        size = (config.outputs, THREADS, units)
        own = [stacked(each[unit : unit + units]).reshape(size) for each in words]
        made.append((unit, _in_order(own, config, shape.bits)))
    return made


def _ones(codes: Float[Array, "o i"], place: int, group_units: int) -> Float[Array, "o i"]:
    """1 where codes of a group are, of which codes may be as many as it has, or a whole block."""
    if codes.shape[1] <= group_units * UNIT:
        return jnp.ones_like(codes)
    unit = jax.lax.div(iota(codes.shape, 1), 2) % THREADS
    mine = jax.lax.div(unit, group_units) == place
    return jnp.where(mine, 1.0, 0.0).astype(codes.dtype)


def _words(
    shape: Shape, config: SomeRows, codes_ref: Any, first: Any, start: Any, word: int
) -> UInt[Array, "o u"] | UInt[Array, "o t u"]:
    """One word of each unit of a block; or, but at 3 bits, one of each thread's words.

    Args:
        shape: see `_codes`.
        config: see `_codes`.
        codes_ref: see `_codes`.
        first: see `_codes`.
        start: see `_codes`.
        word: which.
    """
    size: tuple[int, ...] = (config.outputs, BLOCK_UNITS)
    column: Any = word * shape.units
    if shape.bits > 3:
        size = (config.outputs, THREADS, BLOCK_UNITS)
        column = (iota(size, 1) * (shape.bits // THREADS) + word) * shape.units
    output, unit = iota(size, 0), start + iota(size, len(size) - 1)
    # Warps share what is read eight by eight; tensor cores take 16 of a warp.
    warps = config.num_warps
    warp, pair = output // 8 % warps, output // (8 * warps) % 2
    output = first + output // (16 * warps) * (16 * warps) + warp * 16 + pair * 8 + output % 8
    mask = shape.mask((config.outputs, config.units), output, unit)
    return load(codes_ref, output, column + unit, mask=mask)


def _in_order(
    words: list[UInt[Array, "o t u"]],
    config: SomeRows,
    bits: int,
    taken: Bool[Array, "o t u"] | None = None,
) -> Float[Array, "o i"]:
    """Codes of threads' words, less their centre, as `turn` has them.

    Args:
        words: of parts; at 3 bits, where parts are units, of one unit.
        config: see there.
        bits: of a code.
        taken: see `pairs`.
    """
    codes = stacked(values(words, bits, taken))
    size = (-1, 2, config.num_warps, 8, THREADS, words[0].shape[2], part_width(bits) // 4, 2, 2)
    codes = codes.reshape(size).transpose(0, 2, 1, 3, 5, 6, 7, 4, 8)
    return codes.reshape(config.outputs, -1)


def _inputs(
    shape: Shape, config: SomeRows, x_ref: Any, first_row: Any, unit: Any, width: int
) -> Float[Array, "m i"]:
    """So many inputs from a unit on, turned, of the program's rows."""
    size = config.rows, width
    row = first_row + iota(size, 0)
    mask = row < shape.rows if shape.rows % config.rows else None
    return load(x_ref, row, unit * UNIT + iota(size, 1), mask=mask)
