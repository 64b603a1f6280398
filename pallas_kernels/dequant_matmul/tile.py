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

from .._compat import dot, multiply_add
from ..lanes import parts
from .config import BLOCK_UNITS, SomeRows
from .layout import UNIT
from .operands import Shape, above_zero, iota, load, per_group
from .pairs import values
from .turn import THREADS, Turn, part_width
from .unit import stacked

Inputs = Callable[[Any, int], Float[Array, "m i"]]
"""So many inputs from a unit on, turned, of the rows of a program: for each of `copies`."""


def products(
    shape: Shape,
    config: SomeRows,
    matrices: Sequence[tuple[Sequence[Any], Any]],
    first: Any,
    steps: tuple[Any, Any],
    inputs: Inputs,
) -> list[Float[Array, "o m"]]:
    """Sums of one program over a range of units, for each of some matrices of one format.

    Args:
        shape: of one of the products; its rows are not looked at.
        config: see there.
        matrices: of each, codes, scales and perhaps zero points, and the row of them that is its
            first output.
        first: output of the program.
        steps: first iteration and the one after the last, of `config.units` units each.
        inputs: see there.
    """
    # Outputs first: then what is decoded is multiplied as it lies in registers.
    groups = copies(shape)
    units = min(shape.group_units, BLOCK_UNITS) if groups == 1 else BLOCK_UNITS
    places = range(0, config.units, units)

    def numbers(index: Any) -> list[list[list[Array]]]:
        start = index * config.units
        return [
            [_numbers(shape, config, refs[1:], row, first, start + unit) for refs, row in matrices]
            for unit in places
        ]

    def add(index: Array, carry: Any) -> Any:
        totals, of_groups = carry
        # One iteration ahead: nothing else here is read and needed in the same one.
        following = numbers(index + 1)
        start = index * config.units
        made = [_codes(shape, config, refs[0], row, first, start) for refs, row in matrices]
        for unit, *codes, mine in zip(places, *made, of_groups, strict=True):
            x = inputs(start + unit, units * UNIT)
            parts_of = zip(totals, codes, mine, strict=True)
            totals = [
                _scaled(total, own, scales, x, config.rows) for total, own, scales in parts_of
            ]
        return totals, following

    # Each group's sums stay apart until the end.
    total = jnp.zeros((config.outputs, groups * config.rows), jnp.float32)
    start = [total] * len(matrices), numbers(steps[0])
    totals, _ = jax.lax.fori_loop(*steps, add, start)
    if groups == 1:
        return totals
    size = config.outputs, groups, config.rows
    return [jnp.sum(total.reshape(size), axis=1) for total in totals]


def copies(shape: Shape) -> int:
    """How many copies of the inputs a product reads, each zero but for one group of a block.

    At 3 bits, each thread has a whole unit, and all are multiplied at once. So that groups have
    sums of their own, they meet rows of their own.
    """
    return max(1, BLOCK_UNITS // shape.group_units) if shape.bits == 3 else 1


def turn(shape: Shape) -> Turn:
    """The order in which a matrix meets inputs."""
    return Turn(part_width(shape.bits), copies(shape))


def _numbers(
    shape: Shape, config: SomeRows, refs: Sequence[Any], row: Any, first: Any, unit: Any
) -> list[Float[Array, "o g"]]:
    """Scales of groups that are multiplied together; with zero points, how far the centre is above.

    Args:
        shape: of the product.
        config: see there.
        refs: scales and perhaps zero points.
        row: of them, that is the first output.
        first: output of the program.
        unit: first.
    """
    size = config.outputs, copies(shape)
    output, unit = first + iota(size, 0), unit + iota(size, 1) * shape.group_units
    mask = unit < shape.units
    if shape.outputs % size[0]:
        mask = mask & (output < shape.outputs)
    where = row + output, unit // shape.group_units, mask
    return [per_group(refs[0], *where), *(above_zero(shape, ref, *where) for ref in refs[1:])]


def _scaled(
    total: Float[Array, "o gm"],
    codes: Float[Array, "o i"],
    numbers: list[Float[Array, "o g"]],
    x: Float[Array, "gm i"],
    rows: int,
) -> Float[Array, "o gm"]:
    """With products of inputs and the numbers that codes of one or more groups stand for.

    Args:
        total: so far.
        codes: less their centre.
        numbers: of the groups.
        x: inputs, for each group those of all rows.
        rows: see `x`.
    """
    outputs, groups = numbers[0].shape
    products = dot(codes, x.T)

    def spread(each: Float[Array, "o g"]) -> Float[Array, "o gm"]:
        return jnp.broadcast_to(each[:, :, None], (outputs, groups, rows)).reshape(products.shape)

    scale, *above = numbers
    if above:
        products = products + spread(above[0]) * dot(jnp.ones_like(codes), x.T)
    return multiply_add(products, spread(scale), total)


def _codes(
    shape: Shape, config: SomeRows, codes_ref: Any, row: Any, first: Any, start: Any
) -> list[Float[Array, "o i"]]:
    """The codes of an iteration, as many as are multiplied together: a group's, or a block's.

    Args:
        shape: of the product.
        config: see there.
        codes_ref: words.
        row: of them, that is the first output.
        first: output of the program.
        start: first unit.
    """
    read = functools.partial(_words, shape, config, codes_ref, row, first, start)
    if shape.bits == 3:
        size = config.outputs, config.blocks, BLOCK_UNITS
        blocks = [parts(read(word).reshape(size).transpose(0, 2, 1)) for word in range(3)]
        return [
            _in_order([word[..., None] for word in block], config, 3)
            for block in zip(*blocks, strict=True)
        ]
    units = min(shape.group_units, BLOCK_UNITS)
    words = [parts(read(word)) for word in range(shape.bits // THREADS)]
    size = (config.outputs, THREADS, units)
    return [
        _in_order(
            [stacked(each[unit : unit + units]).reshape(size) for each in words], config, shape.bits
        )
        for unit in range(0, config.units, units)
    ]


def _words(
    shape: Shape, config: SomeRows, codes_ref: Any, row: Any, first: Any, start: Any, word: int
) -> UInt[Array, "o u"] | UInt[Array, "o t u"]:
    """One word of each unit of an iteration; or, but at 3 bits, one of each thread's words.

    All at once: a multiprocessor looks for the rows of a request one by one, and a row of few units
    takes as long as one of many.

    Args:
        shape: see `_codes`.
        config: see `_codes`.
        codes_ref: see `_codes`.
        row: see `_codes`.
        first: see `_codes`.
        start: see `_codes`.
        word: which.
    """
    size: tuple[int, ...] = (config.outputs, config.units)
    column: Any = word * shape.units
    if shape.bits > 3:
        size = (config.outputs, THREADS, config.units)
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
