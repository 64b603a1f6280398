"""The first launch: silu(gate) * up of every slot, of the shared expert, and the latter's strength.

Slots differ in their expert, whose number is read here. A program makes some gates and the rows
above that belong to them. Programs of the shared expert come first, since their matrices may have
more bits. An empty slot's numbers are not written, and must not count.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from .._compat import triton_call
from ..dequant_matmul.few_rows import stacked
from ..dequant_matmul.operands import iota
from ..dequant_matmul.qtensor import QTensor
from .config import Cut
from .matrix import Matrix, Units, all_of, arrays_of, inputs_of_units, matrix_of
from .shared import SharedExpert


def gated(
    x: Float[Array, "M D"],
    ids: Int[Array, "M A"],
    gate_up_proj: Float[Array, "E F2 D"] | QTensor,
    shared: SharedExpert | None,
    dtype: Any,
    cut: Cut,
    shared_outputs: int,
) -> tuple[Array, ...]:
    """What the down projections read, rounded; of the shared expert also sigmoid(logit) [M, 1].

    Args:
        x: tokens.
        ids: experts.
        gate_up_proj: of all experts.
        shared: expert.
        dtype: to which results are rounded.
        cut: how the work of slots is cut.
        shared_outputs: gates of the shared expert a program.

    Returns:
        [M * A, F]; with a shared expert also [M, Fs] and [M, 1].
    """
    tokens, slots = ids.shape
    experts, rows, _ = gate_up_proj.shape
    hidden, matrix = rows // 2, matrix_of(gate_up_proj)
    tiles = pl.cdiv(hidden, cut.outputs)
    arrays = [x, ids, *arrays_of(gate_up_proj)]
    shapes = [jax.ShapeDtypeStruct((tokens * slots, hidden), dtype)]
    own, shared_hidden, shared_tiles, shared_programs = matrix, 0, 0, 0
    if shared is not None:
        own, shared_hidden = matrix_of(shared.gate_proj), shared.gate_proj.shape[0]
        shared_tiles = pl.cdiv(shared_hidden, shared_outputs)
        shared_programs = tokens * (shared_tiles + 1)
        arrays += [*arrays_of(shared.gate_proj), *arrays_of(shared.up_proj), shared.gate]
        shapes += [
            jax.ShapeDtypeStruct((tokens, shared_hidden), dtype),
            jax.ShapeDtypeStruct((tokens, 1), jnp.float32),
        ]

    def kernel(x_ref: Any, ids_ref: Any, *refs: Any) -> None:
        program = pl.program_id(0)
        routed_refs, refs = refs[: matrix.count], refs[matrix.count :]

        @pl.when(program >= shared_programs)
        def _() -> None:
            index = program - shared_programs
            slot, first = index // tiles, index % tiles * cut.outputs
            expert = ids_ref[slot // slots, slot % slots]

            @pl.when((expert >= 0) & (expert < experts))
            def _() -> None:
                gate = expert * rows
                parts = (routed_refs, gate), (routed_refs, gate + hidden)
                made = _made(matrix, parts, (x_ref, slot // slots), first, hidden, cut)
                store(refs[-1 if shared is None else -3], slot, first, hidden, made)

        if shared is not None:
            of_gate, of_up = refs[: own.count], refs[own.count : 2 * own.count]
            shared_cut = Cut(shared_outputs, cut.units, cut.num_warps)

            @pl.when(program < tokens * shared_tiles)
            def _() -> None:
                token, first = program // shared_tiles, program % shared_tiles * shared_outputs
                parts = (of_gate, 0), (of_up, 0)
                made = _made(own, parts, (x_ref, token), first, shared_hidden, shared_cut)
                store(refs[-2], token, first, shared_hidden, made)

            @pl.when((program >= tokens * shared_tiles) & (program < shared_programs))
            def _() -> None:
                token = program - tokens * shared_tiles
                logit = _logit(x_ref, token, refs[2 * own.count], cut.num_warps)
                refs[-1][token, 0] = jax.lax.logistic(logit)

    programs = shared_programs + tokens * slots * tiles
    return tuple(
        triton_call(
            kernel,
            num_warps=cut.num_warps,
            num_stages=1,
            name="expert_dispatch_gate_up",
            grid=(programs,),
            out_shape=shapes,
        )(*arrays)
    )


def _made(
    matrix: Matrix,
    parts: tuple[tuple[Any, Any], tuple[Any, Any]],
    x: tuple[Any, Any],
    first: Any,
    hidden: int,
    cut: Cut,
) -> Float[Array, "o n"]:
    """Silu(gate) * up of a program.

    Args:
        matrix: how gates and the rows above are read.
        parts: arrays and first row, of gates and of the rows above.
        x: tokens, and which.
        first: gate of the program.
        hidden: number of gates.
        cut: see there.
    """
    units = Units(cut.tile, 1, matrix.units)

    def add(step: Any, sums: list[Array]) -> list[Array]:
        _, unit, exists = units.at(step, cut.tile)

        read = []
        for start in range(0, cut.outputs, cut.outputs_at_once):
            index = first + start + iota(cut.tile, 0)
            inside = index < hidden if hidden % cut.outputs else None
            mask = all_of(cut.tile, exists, inside)
            read += [matrix.read(refs, row + index, unit, mask) for refs, row in parts]
        values = matrix.prepared(inputs_of_units(*x, units, step, matrix))
        made = [matrix.product(each, values) for each in read]
        return [total + product for total, product in zip(sums, made, strict=True)]

    sums = units.over_steps(add, 2 * (cut.outputs // cut.outputs_at_once))
    gate, up = (jnp.sum(stacked(sums[part::2]), axis=1) for part in range(2))
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


def _logit(x_ref: Any, token: Any, gate_ref: Any, num_warps: int) -> Float[Array, ""]:
    """The product of a token and the one row of the gate."""
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
    return jnp.sum(total)
