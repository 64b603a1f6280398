"""Integer codes of a tile of outputs on tensor cores, the scale on each group's sum.

Threads multiply what they decoded themselves, and codes never go through shared memory in bfloat16:
see `turn`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt

from .._compat import dot
from ..lanes import parts
from .config import BLOCK_UNITS, SomeRows
from .layout import UNIT
from .operands import Shape, above_zero, iota, load, per_group
from .pairs import values
from .turn import THREADS, part_width
from .unit import stacked

Inputs = Callable[[Any, int], Float[Array, "m i"]]
"""So many inputs from a unit on, turned, of the rows of a program: for each of `copies`."""


def products(
    shape: Shape,
    config: SomeRows,
    matrices: Sequence[tuple[tuple[Any, ...], Any]],
    first: Any,
    steps: tuple[Any, Any],
    inputs: Inputs,
) -> list[Float[Array, "o m"]]:
    """Sums of one program over a range of units, for each of some matrices of one format.

    Args:
        shape: of one of the products; its rows are not looked at.
        config: see there.
        matrices: of each, the arrays that it lies in, codes, scales and perhaps zero points, and
            the row of them that is its first output.
        first: output of the program.
        steps: first iteration and the one after the last, of `config.units` units each.
        inputs: see there.
    """
    # Outputs first: then what is decoded is multiplied as it lies in registers.
    units = min(shape.group_units, BLOCK_UNITS) if copies(shape) == 1 else BLOCK_UNITS

    def add(index: Array, totals: list[Float[Array, "o m"]]) -> list[Float[Array, "o m"]]:
        for block in range(config.blocks):
            start = index * config.units + block * BLOCK_UNITS
            made = [_codes(shape, config, refs[0], row, first, start) for refs, row in matrices]
            for place, codes in enumerate(zip(*made, strict=True)):
                unit = start + place * units
                x = inputs(unit, units * UNIT)
                totals = [
                    total + _scaled(shape, config, refs[1:], (row, first, unit), mine, x)
                    for total, (refs, row), mine in zip(totals, matrices, codes, strict=True)
                ]
        return totals

    size = config.outputs, config.rows
    return jax.lax.fori_loop(*steps, add, [jnp.zeros(size, jnp.float32)] * len(matrices))


def copies(shape: Shape) -> int:
    """How many copies of the inputs a product reads, each zero but for one group of a block.

    At 3 bits, each thread has a whole unit, and all are multiplied at once. So that groups have
    sums of their own, they meet rows of their own.
    """
    return max(1, BLOCK_UNITS // shape.group_units) if shape.bits == 3 else 1


def order(shape: Shape) -> tuple[int, int]:
    """Width of parts and number of copies, see `turn.turned`."""
    return part_width(shape.bits), copies(shape)


def _scaled(
    shape: Shape,
    config: SomeRows,
    refs: tuple[Any, ...],
    at: tuple[Any, Any, Any],
    codes: Float[Array, "o i"],
    x: Float[Array, "gm i"],
) -> Float[Array, "o m"]:
    """Products of inputs and the numbers that codes of one or more groups stand for.

    Args:
        shape: of the product.
        config: see there.
        refs: scales and perhaps zero points.
        at: row of them that is the first output, output of the program, first unit.
        codes: less their centre.
        x: inputs, for each group those of all rows.
    """
    row, first, unit = at
    size = config.outputs, x.shape[0] // config.rows
    output, unit = first + iota(size, 0), unit + iota(size, 1) * shape.group_units
    mask = shape.mask((config.outputs, config.units), output, unit)
    where = row + output, unit // shape.group_units, mask

    def spread(numbers: Float[Array, "o g"]) -> Float[Array, "o gm"]:
        wide = jnp.broadcast_to(numbers[:, :, None], (*size, config.rows))
        return wide.reshape(products.shape)

    products = dot(codes, x.T)
    if len(refs) > 1:
        sums = dot(jnp.ones_like(codes), x.T)
        products = products + spread(above_zero(shape, refs[1], *where)) * sums
    products = products * spread(per_group(refs[0], *where))
    return products if size[1] == 1 else jnp.sum(products.reshape(*size, config.rows), axis=1)


def _codes(
    shape: Shape, config: SomeRows, codes_ref: Any, row: Any, first: Any, start: Any
) -> list[Float[Array, "o i"]]:
    """The codes of a block's groups; at 3 bits, of all of them at once.

    Args:
        shape: of the product.
        config: see there.
        codes_ref: words.
        row: of them, that is the first output.
        first: output of the program.
        start: unit of the block.
    """
    read = functools.partial(_words, shape, config, codes_ref, row, first, start)
    if shape.bits == 3:
        return [_in_order([read(word)[..., None] for word in range(3)], config, 3)]
    units = min(shape.group_units, BLOCK_UNITS)
    words = [parts(read(word)) for word in range(shape.bits // THREADS)]
    size = (config.outputs, THREADS, units)
    return [
        _in_order(
            [stacked(each[unit : unit + units]).reshape(size) for each in words], config, shape.bits
        )
        for unit in range(0, BLOCK_UNITS, units)
    ]


def _words(
    shape: Shape, config: SomeRows, codes_ref: Any, row: Any, first: Any, start: Any, word: int
) -> UInt[Array, "o u"] | UInt[Array, "o t u"]:
    """One word of each unit of a block; or, but at 3 bits, one of each thread's words.

    Args:
        shape: see `_codes`.
        config: see `_codes`.
        codes_ref: see `_codes`.
        row: see `_codes`.
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
    return load(codes_ref, row + output, column + unit, mask=mask)


def _in_order(
    words: list[UInt[Array, "o t u"]], config: SomeRows, bits: int
) -> Float[Array, "o i"]:
    """Codes of threads' words, less their centre, as `turn` has them.

    Args:
        words: of parts; at 3 bits, where parts are units, of one unit.
        config: see there.
        bits: of a code.
    """
    codes = stacked(values(words, bits))
    size = (-1, 2, config.num_warps, 8, THREADS, words[0].shape[2], part_width(bits) // 4, 2, 2)
    codes = codes.reshape(size).transpose(0, 2, 1, 3, 5, 6, 7, 4, 8)
    return codes.reshape(config.outputs, -1)
