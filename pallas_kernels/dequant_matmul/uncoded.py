"""Pieces without codes: what their programs do in the kernels of few and of some rows.

Small matrices that are not worth coding share their input with large ones that are, and would be
launches of their own.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Bool, Float

from .._compat import dot, multiply_add
from .config import BLOCK_UNITS, FewRows, SomeRows
from .operands import Shape, inputs_of, iota, load, x_tile
from .pieces import Share, chosen

# Numbers that a thread reads at once: 16 bytes in bfloat16.
PIECE = 8
UNROLLED = 4
BLOCK = inputs_of(BLOCK_UNITS)


def few_rows(shares: Sequence[Share], config: FewRows, x_ref: Any) -> None:
    """Outputs of one program, each a sum over all inputs, on CUDA cores.

    Args:
        shares: pieces of the same dtype; their arrays are matrices.
        config: its outputs and warps.
        x_ref: rows.
    """
    shape = shares[0].shape
    tile = config.outputs, PIECE * 32 * config.num_warps

    def add(step: Any, sums: list[Array]) -> list[Array]:
        column, alone = (step * tile[1] + iota(size, 1) for size in (tile, (1, tile[1])))
        matrix = chosen(
            shares,
            lambda s: _tile(s.shape, s.refs[0], s.first + iota(tile, 0), column, tile),
        ).astype(jnp.float32)
        mask = alone < shape.inputs if shape.inputs % tile[1] else None

        found = []
        for row, total in enumerate(sums):
            rows = jnp.full(alone.shape, row, jnp.int32)
            x = load(x_ref, rows, alone, mask=mask).astype(jnp.float32)
            found.append(multiply_add(matrix, x, total))
        return found

    sums = [jnp.zeros(tile, jnp.float32)] * shape.rows
    steps = pl.cdiv(shape.inputs, tile[1])
    if steps <= UNROLLED:
        for step in range(steps):
            sums = add(step, sums)
    else:
        sums = jax.lax.fori_loop(0, steps, add, sums)
    for row, total in enumerate(sums):
        total = jnp.sum(total, axis=1)
        chosen(shares, functools.partial(_store, row, total.astype(shape.dtype)))


def _store(row: int, sums: Float[Array, " o"], share: Share) -> None:
    shape, size = share.shape, sums.shape
    output = share.first + jax.lax.iota(jnp.int32, size[0])
    plt.store(
        share.out_ref.at[jnp.full(size, row, jnp.int32), output],
        sums,
        mask=output < shape.outputs if shape.outputs % size[0] else None,
    )


def some_rows(
    shape: Shape,
    config: SomeRows,
    first: Any,
    first_row: Any,
    steps: tuple[Any, Any],
    x_ref: Any,
    weight_ref: Any,
) -> Float[Array, "o m"]:
    """Sums of one program over a range of blocks of inputs, on tensor cores.

    Args:
        shape: of the piece.
        config: see there.
        first: output of the program.
        first_row: row of it.
        steps: first iteration and the one after the last, of `config.units` units each.
        x_ref: rows.
        weight_ref: the matrix.
    """
    tile = config.outputs, BLOCK
    output = first + iota(tile, 0)
    row = first_row + jax.lax.iota(jnp.int32, config.rows)
    first_block, last = config.blocks * steps[0], pl.cdiv(shape.inputs, BLOCK)

    def add(index: Array, total: Float[Array, "o m"]) -> Float[Array, "o m"]:
        start = index * BLOCK
        weight = _tile(shape, weight_ref, output, start + iota(tile, 1), tile)
        x = x_tile(shape, x_ref, row, start, BLOCK)
        return total + dot(weight, x.astype(weight.dtype).T)

    total = jnp.zeros((config.outputs, config.rows), jnp.float32)
    return jax.lax.fori_loop(first_block, jnp.minimum(config.blocks * steps[1], last), add, total)


def _tile(
    shape: Shape, weight_ref: Any, output: Array, column: Array, tile: tuple[int, int]
) -> Float[Array, "o i"]:
    """Numbers of the matrix; zero outside."""
    mask: Bool[Array, "o i"] | None = None
    if shape.outputs % tile[0]:
        mask = output < shape.outputs
    if shape.inputs % tile[1]:
        exists = column < shape.inputs
        mask = exists if mask is None else mask & exists
    return load(weight_ref, output, column, mask=mask)
