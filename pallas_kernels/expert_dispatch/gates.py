"""Gates, the rows above that belong to them, and where a program's outputs lie."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from ..dequant_matmul.few_rows import along_last
from ..dequant_matmul.operands import iota
from .config import Cut
from .matrix import Matrix, Units, all_of, inputs_of_units


def made(
    matrix: Matrix,
    parts: tuple[tuple[Any, Any], tuple[Any, Any]],
    x: tuple[Any, Any],
    first: Any,
    hidden: int,
    cut: Cut,
    abreast: bool = False,
) -> Float[Array, "o n"]:
    """Silu(gate) * up of a program.

    Args:
        matrix: how gates and the rows above are read.
        parts: arrays and first row, of gates and of the rows above.
        x: tokens, and which.
        first: gate of the program.
        hidden: number of gates.
        cut: see there.
        abreast: see `Units`.
    """
    units = Units(cut.tile, 1, matrix.units, abreast)

    def add(step: Any, sums: list[Array]) -> list[Array]:
        _, unit, exists = units.at(step, cut.tile)

        read = []
        for start in range(0, cut.outputs, cut.outputs_at_once):
            index = first + start + iota(cut.tile, 0)
            inside = index < hidden if hidden % cut.outputs else None
            mask = all_of(cut.tile, exists, inside)
            read += [matrix.read(refs, row + index, unit, mask) for refs, row in parts]
        values = inputs_of_units(*x, units, step, matrix)
        values = matrix.prepared(values, read if cut.awaited else ())
        products = [matrix.product(each, values) for each in read]
        return [total + product for total, product in zip(sums, products, strict=True)]

    sums = units.over_steps(add, 2 * (cut.outputs // cut.outputs_at_once))
    gate, up = (jnp.sum(along_last(sums[part::2]), axis=1) for part in range(2))
    return gate * jax.lax.logistic(gate) * up


def columns(first: Any, size: tuple[int, int]) -> Int[Array, "o n"]:
    """The outputs of a program: one behind the other along the first axis."""
    return first + size[0] * iota(size, 1) + iota(size, 0)


def store(ref: Any, row: Any, first: Any, outputs: int, made: Float[Array, "o n"]) -> None:
    """Write what a program made.

    Args:
        ref: rows of outputs.
        row: which.
        first: output of the program.
        outputs: of a row.
        made: see `columns`.
    """
    size = made.shape[0], made.shape[1]
    column = columns(first, size)
    mask = column < outputs if outputs % (size[0] * size[1]) else None
    plt.store(ref.at[jnp.full(size, row, jnp.int32), column], made.astype(ref.dtype), mask=mask)


def strength(
    x_ref: Any, token: Any, gate_ref: Any, given_ref: Any, num_warps: int
) -> Float[Array, ""]:
    """Sigmoid of a logit: the one given, or the product of a token and the one row of the gate.

    Args:
        x_ref: tokens.
        token: which.
        gate_ref: the gate.
        given_ref: logits of tokens, NaN where none is given; None if there are none.
        num_warps: of the program.
    """
    width = x_ref.shape[1]
    block = min(1 << (width - 1).bit_length(), 32 * num_warps * 8)
    total = jnp.zeros((block,), jnp.float32)
    for start in range(0, width, block):
        column = start + jax.lax.iota(jnp.int32, block)
        mask = column < width
        rows = jnp.full((block,), token, jnp.int32)
        x = plt.load(x_ref.at[rows, column], mask=mask, other=0)
        zeros = jnp.zeros_like(rows)
        gate = plt.load(gate_ref.at[zeros, column], mask=mask, other=0)
        total = total + x.astype(jnp.float32) * gate.astype(jnp.float32)
    logit = jnp.sum(total)
    if given_ref is not None:
        given = given_ref[token, 0]
        logit = jnp.where(jnp.isnan(given), logit, given)
    return jax.lax.logistic(logit)
