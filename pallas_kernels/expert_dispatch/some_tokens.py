"""Some tokens, of which several share experts: an expert's tile is decoded once for all of them.

The slots of an expert are a row of a table, or several, of so many each; a launch of its own makes
it, see `order`. A program owns some outputs of a row, on tensor cores; programs of slots that are
not the first of a row end at once. The shared expert is one more, whose rows are of tokens. Nothing
is added to by two programs: what slots make lies by slot, and a last launch sums it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from .._compat import triton_call
from ..dequant_matmul.config import SomeRows
from ..dequant_matmul.qtensor import QTensor
from . import combine, shared_tokens
from .config import SomeTokens
from .joint import Joint, row_of
from .order import Order, ordered
from .shared import SharedExpert
from .shared_tokens import Cuts, SharedDown, SharedGates, silu


def some_tokens(
    x: Float[Array, "M D"],
    ids: Int[Array, "M A"],
    weights: Float[Array, "M A"],
    gate_up_proj: QTensor,
    down_proj: QTensor,
    shared: SharedExpert | None,
    residual: Float[Array, "M D"] | None,
    inner_dtype: Any,
    dtype: Any,
    config: SomeTokens,
) -> Float[Array, "M D"]:
    """See `api.expert_dispatch`; all matrices are in codes, `inner_dtype` is bfloat16."""
    experts = down_proj.shape[0]
    joint = _gates(gate_up_proj, config)
    wanted = [(joint.turn, joint.columns)]
    if shared is not None:
        wanted.append(shared_tokens.wanted(shared, _cuts(config)))
    order = ordered(x, ids, experts, config.gate_up.rows, wanted)
    made, *own = gated(x, order, ids.shape[1], gate_up_proj, down_proj, shared, config)
    y, *beside = down(made, own, order, down_proj, shared, config)
    return combine.summed(y, ids, weights, experts, dtype, beside[0] if beside else None, residual)


def gated(
    x: Float[Array, "M D"],
    order: Order,
    slots: int,
    weight: QTensor,
    below: QTensor,
    shared: SharedExpert | None,
    config: SomeTokens,
) -> tuple[Array, ...]:
    """Silu(gate) * up of each slot, in bfloat16, turned as the down projections need it.

    Args:
        x: tokens.
        order: of slots and tokens.
        slots: of each token.
        weight: gates and the rows above of all experts.
        below: down projections of all experts.
        shared: expert.
        config: see there.

    Returns:
        [copies * S, F and more], whose columns behind F hold anything; and, of the shared expert,
        the same [copies * M, Fs and more] and its strengths [M, 1].
    """
    joint, rows = _gates(weight, config), order.experts.size
    behind = Joint.of(below, below.shape[1], config.down)
    own = None
    if shared is not None:
        warps = config.gate_up.num_warps
        own = SharedGates(x, order.inputs[1], shared, _cuts(config), warps)

    def routed(ins: Sequence[Any], out_ref: Any, index: Any) -> None:
        _gates_of_row(joint, behind, slots, ins, out_ref, index)

    return _launched(
        routed,
        [order.inputs[0], order.experts, order.slots, *joint.arrays],
        behind.struct_of(rows),
        rows * joint.tiles,
        own,
        config.gate_up,
        "expert_dispatch_gate_up",
    )


def down(
    made: Float[Array, "CS F"],
    own: list[Array],
    order: Order,
    weight: QTensor,
    shared: SharedExpert | None,
    config: SomeTokens,
) -> tuple[Array, ...]:
    """Down projections of each slot, in float32.

    Args:
        made: by `gated`.
        own: what it made of the shared expert.
        order: of slots.
        weight: of all experts.
        shared: expert.
        config: see there.

    Returns:
        [S, D], in slots that are not filled anything; and the shared expert's part [M, D].
    """
    rows, width = order.experts.size, weight.shape[1]
    joint = Joint.of(weight, width, config.down)
    beside = None
    if shared is not None:
        own_made, strength = own
        beside = SharedDown(own_made, strength, shared, config.shared_down)

    def routed(ins: Sequence[Any], out_ref: Any, index: Any) -> None:
        _outputs_of_row(joint, ins, out_ref, index)

    return _launched(
        routed,
        [made, order.experts, order.slots, *joint.arrays],
        jax.ShapeDtypeStruct((rows, width), jnp.float32),
        rows * joint.tiles,
        beside,
        config.down,
        "expert_dispatch_down",
    )


def _launched(
    routed: Callable[[Sequence[Any], Any, Any], None],
    arrays: list[Array],
    shape: jax.ShapeDtypeStruct,
    programs: int,
    beside: SharedGates | SharedDown | None,
    cut: SomeRows,
    name: str,
) -> tuple[Array, ...]:
    """A launch of the shared expert's programs, if there are some, and behind them the others.

    Args:
        routed: a program of a routed expert; takes arrays, the result, and its number.
        arrays: that it reads.
        shape: of its result.
        programs: of routed experts.
        beside: the shared expert's.
        cut: of which warps and stages are those of all.
        name: of the launch.
    """
    count, shapes, first, more = len(arrays), [shape], 0, []
    if beside is not None:
        shapes, first, more = [shape, *beside.shapes], beside.programs, beside.arrays

    def kernel(*refs: Any) -> None:
        program = pl.program_id(0)
        ins, outs = refs[: count + len(more)], refs[count + len(more) :]

        @pl.when(program >= first)
        def _() -> None:
            routed(ins[:count], outs[0], program - first)

        if beside is not None:
            beside.run(program, ins[count:], outs[1:])

    return tuple(
        triton_call(
            kernel,
            num_warps=cut.num_warps,
            num_stages=cut.num_stages,
            name=name,
            grid=(first + programs,),
            out_shape=shapes,
        )(*arrays, *more)
    )


def _gates_of_row(
    joint: Joint, behind: Joint, slots: int, ins: Sequence[Any], out_ref: Any, index: Any
) -> None:
    """Gates of some slots of one expert.

    Args:
        joint: gates and the rows above of all experts.
        behind: what reads them.
        slots: of each token.
        ins: tokens in order, experts and slots of rows, the stack.
        out_ref: gates of slots.
        index: program.
    """
    x_ref, experts_ref, slots_ref, *of_experts = ins
    slot, first = joint.place(index)
    expert, hidden = experts_ref[slot], joint.shape.outputs
    # Outside of the condition, so that it does not wait for the expert.
    mine = row_of(slots_ref, slot)

    @pl.when(expert >= 0)
    def _() -> None:
        inputs = joint.inputs(x_ref, mine, slots)
        start = expert * (2 * hidden)
        matrices = [(of_experts, start), (of_experts, start + hidden)]
        behind.store(out_ref, mine, first, silu(joint.products(matrices, first, inputs)))


def _outputs_of_row(joint: Joint, ins: Sequence[Any], out_ref: Any, index: Any) -> None:
    """Down projections of some slots of one expert; `ins` as of `_gates_of_row`."""
    made_ref, experts_ref, slots_ref, *of_experts = ins
    slot, first = joint.place(index)
    expert, mine = experts_ref[slot], row_of(slots_ref, slot)

    @pl.when(expert >= 0)
    def _() -> None:
        inputs = joint.inputs(made_ref, mine, 1)
        start = expert * joint.shape.outputs
        [y] = joint.products([(of_experts, start)], first, inputs)
        joint.store_plainly(out_ref, mine, first, y)


def _gates(weight: QTensor, config: SomeTokens) -> Joint:
    """Gates and the rows above of all experts; as many outputs as there are gates."""
    return Joint.of(weight, weight.shape[1] // 2, config.gate_up)


def _cuts(config: SomeTokens) -> Cuts:
    return Cuts(config.shared, config.shared_down)
