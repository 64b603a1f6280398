"""Products of tiles of slots with the matrices of their experts.

A program multiplies a tile with some outputs of its expert; what is left over of the list of tiles
ends at once. Outputs are the products' rows, so that tiles may have few.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Bool, Float, Int

from .._compat import triton_call
from ..dequant_matmul.layout import UNIT
from ..dequant_matmul.operands import iota, load
from .many_tokens_config import Grouped
from .sorting import Tiles
from .stack import Block, Stack


@dataclasses.dataclass(frozen=True)
class Part:
    """Matrices of some experts of a stack.

    Attributes:
        stack: how they are read.
        arrays: that they are.
        first: expert.
        count: of experts.
        whole: whether these are all.
    """

    stack: Stack
    arrays: list[Array]
    first: int
    count: int
    whole: bool


def gated(
    x: Float[Array, "M D"],
    slots: int,
    tiles: Tiles,
    rows: int,
    part: Part,
    hidden: int,
    config: Grouped,
    into: Float[Array, "S F"] | None = None,
) -> Float[Array, "S F"]:
    """Silu(gate) * up of each place whose expert is one of the part's.

    Args:
        x: tokens.
        slots: of each token.
        tiles: of them.
        rows: most of a tile.
        part: of the stack of gates and the rows above.
        hidden: F.
        config: see there.
        into: where the result is written; other places stay. A new array if None.
    """

    def rows_of(place: Array, slot: Array) -> tuple[Array, Array]:
        return jax.lax.div(slot, jnp.int32(slots)), place

    def finished(gate: Array, up: Array) -> Array:
        return gate * jax.lax.logistic(gate) * up

    shape = jax.ShapeDtypeStruct((tiles.slot.size, hidden), x.dtype)
    launch = _Launch("gated", rows, hidden, 2, rows_of, finished, shape)
    return _product(launch, x, tiles, part, config, into)


def down(
    x: Float[Array, "S F"],
    tiles: Tiles,
    rows: int,
    part: Part,
    width: int,
    dtype: Any,
    config: Grouped,
    into: Float[Array, "S D"] | None = None,
) -> Float[Array, "S D"]:
    """The down projection of each place, by slot; see `gated`.

    Args:
        x: of each place.
        tiles: see `gated`.
        rows: see `gated`.
        part: of the stack.
        width: D.
        dtype: of the result.
        config: see there.
        into: see `gated`.
    """

    def rows_of(place: Array, slot: Array) -> tuple[Array, Array]:
        return place, slot

    shape = jax.ShapeDtypeStruct((tiles.slot.size, width), dtype)
    launch = _Launch("down", rows, width, 1, rows_of, lambda y: y, shape)
    return _product(launch, x, tiles, part, config, into)


@dataclasses.dataclass(frozen=True)
class _Launch:
    """What is different between the two products.

    Attributes:
        name: its.
        rows: most of a tile.
        outputs: of each matrix.
        matrices: that an expert has, one below the other.
        rows_of: takes places and their slots; returns rows of the inputs and of the result.
        finished: takes the product with each matrix and returns the result.
        out_shape: of the result.
    """

    name: str
    rows: int
    outputs: int
    matrices: int
    rows_of: Any
    finished: Any
    out_shape: jax.ShapeDtypeStruct


def _product(
    launch: _Launch,
    x: Float[Array, "X I"],
    tiles: Tiles,
    part: Part,
    config: Grouped,
    into: Array | None,
) -> Float[Array, "S O"]:
    arrays = [tiles.slot, tiles.expert, tiles.first, tiles.rows, x, *part.arrays]
    aliases = {}
    if into is not None:
        aliases = {len(arrays): 0}
        arrays.append(into)

    def kernel(slot_ref: Any, expert_ref: Any, first_ref: Any, rows_ref: Any, *refs: Any) -> None:
        first_output, tile = pl.program_id(0) * config.outputs, pl.program_id(1)
        expert, rows = expert_ref[tile] - part.first, rows_ref[tile]
        used = rows > 0
        if not part.whole:
            used = used & (expert >= 0) & (expert < part.count)

        @pl.when(used)
        def _() -> None:
            place = first_ref[tile] + jax.lax.iota(jnp.int32, launch.rows)
            inside = jax.lax.iota(jnp.int32, launch.rows) < rows
            # What is not stored needs an index of its own: the interpreter writes what was there.
            slot = plt.load(slot_ref.at[place], mask=inside, other=tiles.slot.size)
            source, target = launch.rows_of(place, slot)
            output = first_output + jax.lax.iota(jnp.int32, config.outputs)
            weights = part.stack, refs[1 : 1 + len(part.arrays)], expert
            totals = _totals(launch, config, refs[0], source, inside, weights, output)
            _store(launch, refs[-1], target, inside, output, launch.finished(*totals))

    return triton_call(
        kernel,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        name=f"expert_dispatch_{launch.name}",
        grid=(pl.cdiv(launch.outputs, config.outputs), tiles.expert.size),
        out_shape=launch.out_shape,
        input_output_aliases=aliases,
    )(*arrays)


def _totals(
    launch: _Launch,
    config: Grouped,
    x_ref: Any,
    source: Int[Array, " m"],
    inside: Bool[Array, " m"],
    weights: tuple[Stack, tuple[Any, ...], Any],
    output: Int[Array, " o"],
) -> tuple[Float[Array, "o m"], ...]:
    """Products with some outputs of each of an expert's matrices.

    Args:
        launch: see there.
        config: see there.
        x_ref: inputs.
        source: rows of them.
        inside: which of these exist.
        weights: how matrices are read, their arrays, and the expert, of the part.
        output: outputs.
    """
    size = launch.rows, config.units * UNIT
    stack, refs, expert = weights
    row = jnp.broadcast_to(source[:, None], size)
    wide_inside = jnp.broadcast_to(inside[:, None], size)

    def inputs(index: Any) -> Float[Array, "m i"]:
        column, mask = index * size[1] + iota(size, 1), wide_inside
        if stack.inputs % (config.turns * size[1]):
            mask = mask & (column < stack.inputs)
        return load(x_ref, row, column, mask=mask)

    def add(index: Any, totals: tuple[Array, ...]) -> tuple[Array, ...]:
        xs = [inputs(index * config.turns + turn) for turn in range(config.turns)]
        found = []
        for matrix, total in enumerate(totals):
            first = (expert * launch.matrices + matrix) * launch.outputs
            block = Block(first, output, launch.outputs, config.units, config.turns, index)
            found.append(stack.add(refs, block, xs, total))
        return tuple(found)

    totals = (jnp.zeros((config.outputs, launch.rows), jnp.float32),) * launch.matrices
    return jax.lax.fori_loop(0, pl.cdiv(stack.inputs, config.turns * size[1]), add, totals)


def _store(
    launch: _Launch,
    out_ref: Any,
    target: Int[Array, " m"],
    inside: Bool[Array, " m"],
    output: Int[Array, " o"],
    result: Float[Array, "o m"],
) -> None:
    """Write the outputs of a tile.

    Args:
        launch: see there.
        out_ref: the result.
        target: its rows.
        inside: which of them exist.
        output: outputs.
        result: of them.
    """
    mask = jnp.broadcast_to(inside[None, :], result.shape)
    outputs = jnp.broadcast_to(output[:, None], result.shape)
    if launch.outputs % result.shape[0]:
        mask = mask & (outputs < launch.outputs)
    rows = jnp.broadcast_to(target[None, :], result.shape)
    plt.store(out_ref.at[rows, outputs], result.astype(launch.out_shape.dtype), mask=mask)
