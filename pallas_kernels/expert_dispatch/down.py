"""The second launch: down projections of all slots, weighted and summed.

A program owns some outputs of a token and reads them of all its slots at once, each thread a unit
of one slot; so nothing is added to by two programs. Where the slots' units are summed, their
weights are part of the scales. The shared expert's part comes on top, with threads laid out anew:
it is one slot only, and may have other bits.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from .._compat import triton_call
from ..dequant_matmul.few_rows import along_last
from ..dequant_matmul.operands import iota, load
from ..dequant_matmul.qtensor import QTensor
from .between import is_abreast
from .config import Cut
from .gates import columns, store
from .matrix import Matrix, Units, all_of, arrays_of, inputs_of_units, matrix_of
from .shared import SharedExpert


def summed(
    made: tuple[Array, ...],
    ids: Int[Array, "M A"],
    weights: Float[Array, "M A"],
    down_proj: Float[Array, "E D F"] | QTensor,
    shared: SharedExpert | None,
    residual: Float[Array, "M D"] | None,
    dtype: Any,
    cut: Cut,
) -> Float[Array, "M D"]:
    """The weighted sum over slots, the shared expert's output times its strength, and the residual.

    Args:
        made: by `gate_up.gated`.
        ids: experts.
        weights: of slots.
        down_proj: of all experts.
        shared: expert.
        residual: what the sum is added to, if anything.
        dtype: of the result.
        cut: see there.
    """
    tokens, slots = ids.shape
    experts, width, _ = down_proj.shape
    matrix = matrix_of(down_proj)
    tiles = pl.cdiv(width, cut.outputs)
    arrays = [*made, ids, weights, *arrays_of(down_proj)]
    if residual is not None:
        arrays = [residual, *arrays]
    if shared is not None:
        arrays += arrays_of(shared.down_proj)

    def kernel(*refs: Any) -> None:
        program = pl.program_id(0)
        token, first = program // tiles, program % tiles * cut.outputs
        stream = None
        if residual is not None:
            stream, refs = _residual(refs[0], token, first, cut), refs[1:]
        of_made, refs = refs[: len(made)], refs[len(made) :]
        ids_ref, weights_ref, refs = refs[0], refs[1], refs[2:]
        routing = ids_ref, weights_ref, token, slots, experts
        total = None
        if shared is not None:
            # In front: what it reads is on its way while experts' numbers are.
            own = matrix_of(shared.down_proj)
            below = refs[matrix.count : -1]
            total = shared_outputs(own, of_made[1], below, token, first, width, cut)
            total = total * of_made[2][token, 0]
        parts = matrix, of_made[0], refs[: matrix.count]
        sums = _routed(*parts, routing, first, width, cut)
        if total is not None:
            sums = sums + total
        if stream is not None:
            sums = stream + sums
        store(refs[-1], token, first, width, sums)

    return triton_call(
        kernel,
        num_warps=cut.num_warps,
        num_stages=1,
        name="expert_dispatch_down",
        grid=(tokens * tiles,),
        out_shape=jax.ShapeDtypeStruct((tokens, width), dtype),
    )(*arrays)


def _residual(ref: Any, token: Any, first: Any, cut: Cut) -> Float[Array, "o n"]:
    """What a program adds to, in float32; read first, since nothing else waits for it."""
    size = cut.outputs_at_once, cut.outputs // cut.outputs_at_once
    width, column = ref.shape[1], columns(first, size)
    mask = column < width if width % cut.outputs else None
    return load(ref, jnp.full(size, token, jnp.int32), column, mask=mask).astype(jnp.float32)


def _routed(
    matrix: Matrix,
    made_ref: Any,
    refs: tuple[Any, ...],
    routing: tuple[Any, ...],
    first: Any,
    width: int,
    cut: Cut,
) -> Float[Array, "o n"]:
    """Of the routed experts.

    Args:
        matrix: how a stack is read.
        made_ref: what slots' experts made.
        refs: arrays of the stack.
        routing: ids, weights, token, slots a token, experts.
        first: output of the program.
        width: number of outputs.
        cut: see there.
    """
    ids_ref, weights_ref, token, slots, experts = routing
    abreast = is_abreast(matrix, made_ref.dtype)
    units = Units(cut.tile, slots, matrix.units, abreast)
    tokens, row = jnp.full(cut.tile, token, jnp.int32), token if abreast else token * slots

    def add(step: Any, sums: list[Array]) -> list[Array]:
        slot, unit, exists = units.at(step, cut.tile)
        expert = load(ids_ref, tokens, slot, mask=exists)
        strength = load(weights_ref, tokens, slot, mask=exists)
        used = (expert >= 0) & (expert < experts)
        if exists is not None:
            used = used & exists
        expert = jnp.where(used, expert, 0)

        read = []
        for start in range(0, cut.outputs, cut.outputs_at_once):
            output = first + start + iota(cut.tile, 0)
            inside = output < width if width % cut.outputs else None
            mask = all_of(cut.tile, used, inside)
            read.append(matrix.read(refs, expert * width + output, unit, mask))
        values = inputs_of_units(made_ref, row, units, step, matrix)
        values = matrix.prepared(values, read if cut.awaited else ())
        made = [matrix.product(each, values, strength, used) for each in read]
        return [total + product for total, product in zip(sums, made, strict=True)]

    sums = units.over_steps(add, cut.outputs // cut.outputs_at_once)
    return jnp.sum(along_last(sums), axis=1)


def shared_outputs(
    matrix: Matrix,
    made_ref: Any,
    refs: tuple[Any, ...],
    token: Any,
    first: Any,
    width: int,
    cut: Cut,
) -> Float[Array, "o n"]:
    """Of the shared expert.

    All outputs are met at once, by as many threads as are left for each.

    Args:
        matrix: how its down projection is read.
        made_ref: what it made.
        refs: arrays of the projection.
        token: which.
        first: output of the program.
        width: number of outputs.
        cut: see there.
    """
    tile = cut.outputs, max(1, 32 * cut.num_warps // cut.outputs)
    units = Units(tile, 1, matrix.units)
    output = first + iota(tile, 0)

    def add(step: Any, sums: list[Array]) -> list[Array]:
        _, unit, exists = units.at(step, tile)
        mask = all_of(tile, exists, output < width if width % cut.outputs else None)
        read = matrix.read(refs, output, unit, mask)
        values = inputs_of_units(made_ref, token, units, step, matrix)
        prepared = matrix.prepared(values, [read] if cut.awaited else ())
        return [sums[0] + matrix.product(read, prepared)]

    total = jnp.sum(units.over_steps(add, 1)[0], axis=1)
    size = cut.outputs_at_once, cut.outputs // cut.outputs_at_once
    return total.reshape(size[::-1]).T
