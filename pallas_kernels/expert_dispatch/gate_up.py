"""The first launch: silu(gate) * up of every slot, of the shared expert, and the latter's strength.

Slots differ in their expert, whose number is read here. A program makes some gates and the rows
above that belong to them. Programs of the shared expert come first, since their matrices may have
more bits. An empty slot's numbers are not written, and must not count.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from .._compat import triton_call
from ..dequant_matmul.abreast import abreast
from ..dequant_matmul.qtensor import QTensor
from .beside import GateUp
from .between import Between, is_abreast
from .config import FewTokens
from .gates import made, store
from .matrix import Matrix, arrays_of, matrix_of
from .shared import SharedExpert


def gated(
    x: Float[Array, "M D"],
    ids: Int[Array, "M A"],
    gate_up_proj: Float[Array, "E F2 D"] | QTensor,
    shared: SharedExpert | None,
    dtype: Any,
    config: FewTokens,
    below: Matrix,
) -> tuple[Array, ...]:
    """What the down projections read, rounded; of the shared expert also its strength [M, 1].

    Args:
        x: tokens.
        ids: experts.
        gate_up_proj: of all experts.
        shared: expert.
        dtype: to which results are rounded.
        config: see there.
        below: what reads them.

    Returns:
        [M * A, F], or [M, A * F and more] in the order of `abreast`; with a shared expert also
        [M, Fs] and [M, 1].
    """
    (tokens, slots), cut = ids.shape, config.gate_up
    experts, rows, _ = gate_up_proj.shape
    hidden, matrix = rows // 2, matrix_of(gate_up_proj)
    tiles = pl.cdiv(hidden, cut.outputs)
    read = abreast(x.astype(dtype), cut.units) if config.abreast else x
    arrays = [read, x, ids, *arrays_of(gate_up_proj)]
    beside = GateUp(tokens, shared, dtype, config)
    out = Between(below, slots, config.down.units) if is_abreast(below, dtype) else None
    struct = jax.ShapeDtypeStruct(
        (tokens * slots, hidden) if out is None else out.shape(tokens), dtype
    )

    def kernel(x_ref: Any, tokens_ref: Any, ids_ref: Any, *refs: Any) -> None:
        program = pl.program_id(0)
        routed_refs, refs = refs[: matrix.count], refs[matrix.count :]

        @pl.when(program >= beside.programs)
        def _() -> None:
            index = program - beside.programs
            slot, first = index // tiles, index % tiles * cut.outputs
            expert = ids_ref[slot // slots, slot % slots]

            @pl.when((expert >= 0) & (expert < experts))
            def _() -> None:
                gate = expert * rows
                parts = (routed_refs, gate), (routed_refs, gate + hidden)
                token = slot // slots
                x = x_ref, token
                numbers = made(matrix, parts, x, first, hidden, cut, config.abreast)
                if out is None:
                    store(refs[beside.count], slot, first, hidden, numbers)
                else:
                    out.store(refs[beside.count], token, slot % slots, first, numbers)

        beside.run(program, x_ref, tokens_ref, refs)

    return tuple(
        triton_call(
            kernel,
            num_warps=cut.num_warps,
            num_stages=1,
            name="expert_dispatch_gate_up",
            grid=(beside.programs + tokens * slots * tiles,),
            out_shape=[struct, *beside.shapes],
        )(*arrays, *beside.arrays)
    )
