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
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from .._compat import triton_call
from ..dequant_matmul.few_rows import stacked
from ..dequant_matmul.operands import iota, load
from ..dequant_matmul.qtensor import QTensor
from .config import Cut
from .gate_up import UNROLLED
from .matrix import Matrix, Units, arrays_of, inputs_of_units, matrix_of
from .shared import SharedExpert


def summed(
    made: tuple[Array, ...],
    ids: Int[Array, "M A"],
    weights: Float[Array, "M A"],
    down_proj: Float[Array, "E D F"] | QTensor,
    shared: SharedExpert | None,
    dtype: Any,
    cut: Cut,
) -> Float[Array, "M D"]:
    """The weighted sum over slots, and the shared expert's output times its strength.

    Args:
        made: by `gate_up.gated`.
        ids: experts.
        weights: of slots.
        down_proj: of all experts.
        shared: expert.
        dtype: of the result.
        cut: see there.
    """
    tokens, slots = ids.shape
    experts, width, _ = down_proj.shape
    matrix = matrix_of(down_proj)
    tiles = pl.cdiv(width, cut.outputs)
    arrays = [*made, ids, weights, *arrays_of(down_proj)]
    if shared is not None:
        arrays += arrays_of(shared.down_proj)

    def kernel(*refs: Any) -> None:
        of_made, refs = refs[: len(made)], refs[len(made) :]
        ids_ref, weights_ref, *refs = refs
        token = pl.program_id(0) // tiles
        first = pl.program_id(0) % tiles * cut.outputs
        routing = ids_ref, weights_ref, token, slots, experts
        sums = _routed(matrix, of_made[0], refs[: matrix.count], routing, first, width, cut)
        if shared is not None:
            own = matrix_of(shared.down_proj)
            total = _shared(own, of_made[1], refs[matrix.count : -1], token, first, width, cut)
            sums = sums + total * of_made[2][token, 0]
        output = first + jax.lax.iota(jnp.int32, cut.outputs)
        plt.store(
            refs[-1].at[jnp.full((cut.outputs,), token, jnp.int32), output],
            sums.astype(dtype),
            mask=output < width if width % cut.outputs else None,
        )

    return triton_call(
        kernel,
        num_warps=cut.num_warps,
        num_stages=1,
        name="expert_dispatch_down",
        grid=(tokens * tiles,),
        out_shape=jax.ShapeDtypeStruct((tokens, width), dtype),
    )(*arrays)


def _routed(
    matrix: Matrix,
    made_ref: Any,
    refs: tuple[Any, ...],
    routing: tuple[Any, ...],
    first: Any,
    width: int,
    cut: Cut,
) -> Float[Array, " o"]:
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
    units = Units(cut.tile, slots, matrix.units)
    tokens = jnp.full(cut.tile, token, jnp.int32)

    def add(step: Any, sums: tuple[Array, ...]) -> tuple[Array, ...]:
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
            mask = used & (output < width) if width % cut.outputs else used
            read.append(matrix.read(refs, expert * width + output, unit, mask))
        values = inputs_of_units(made_ref, token * slots, units, step, matrix, made_ref.dtype)
        prepared = matrix.prepared(values)
        return tuple(
            matrix.add(each, prepared, total, strength, used)
            for each, total in zip(read, sums, strict=True)
        )

    sums = (jnp.zeros(cut.tile, jnp.float32),) * (cut.outputs // cut.outputs_at_once)
    if units.steps <= UNROLLED:
        for step in range(units.steps):
            sums = add(step, sums)
    else:
        sums = jax.lax.fori_loop(0, units.steps, add, sums)
    together = sums[0][..., None] if len(sums) == 1 else stacked(list(sums))
    return jnp.sum(together, axis=1).T.reshape(cut.outputs)


def _shared(
    matrix: Matrix,
    made_ref: Any,
    refs: tuple[Any, ...],
    token: Any,
    first: Any,
    width: int,
    cut: Cut,
) -> Float[Array, " o"]:
    """Of the shared expert: all outputs are met at once, by as many threads as are left for each.

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

    def add(step: Any, sums: Array) -> Array:
        _, unit, mask = units.at(step, tile)
        if width % cut.outputs:
            mask = output < width if mask is None else mask & (output < width)
        read = matrix.read(refs, output, unit, mask)
        values = inputs_of_units(made_ref, token, units, step, matrix, made_ref.dtype)
        return matrix.add(read, matrix.prepared(values), sums)

    return jnp.sum(jax.lax.fori_loop(0, units.steps, add, jnp.zeros(tile, jnp.float32)), axis=1)
