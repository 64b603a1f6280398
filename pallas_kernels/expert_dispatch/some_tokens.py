"""Some tokens, of which several share experts: an expert's tile is decoded once for all of them.

The slots of an expert are a row of a table, or several, of so many each; a launch of its own makes
it, see `order`. A program owns some outputs of a row, on tensor cores; programs of slots that are
not the first of a row end at once. The shared expert is one more, whose rows are of tokens. Nothing
is added to by two programs: what slots make lies by slot, and a last launch sums it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from .._compat import triton_call
from ..dequant_matmul.config import SomeRows
from ..dequant_matmul.qtensor import QTensor
from . import combine, gates
from .config import SomeTokens
from .joint import Joint, row_of
from .order import Order, ordered
from .shared import SharedExpert


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
    readers = [_gates(gate_up_proj, config)]
    if shared is not None:
        readers.append(_own(shared, config)[0])
    order = ordered(x, ids, experts, readers)
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
    tokens, joint = x.shape[0], _gates(weight, config)
    behind = Joint.of(below, below.shape[1], config.down)
    rows = order.experts.size
    arrays = [order.inputs[0], order.experts, order.slots, *joint.arrays]
    count, shapes = len(arrays), [behind.struct_of(rows)]
    first_routed = of_tokens = end = 0
    gate = last = joint
    if shared is not None:
        gate, up, last = _own(shared, config)
        of_tokens = pl.cdiv(tokens, gate.cut.rows) * gate.tiles
        arrays += [order.inputs[1], *gate.arrays, *up.arrays]
        end = len(arrays)
        arrays += [x, shared.gate, *([] if shared.logit is None else [shared.logit])]
        shapes += [last.struct_of(tokens), jax.ShapeDtypeStruct((tokens, 1), jnp.float32)]
        first_routed = of_tokens + tokens

    def kernel(*refs: Any) -> None:
        program = pl.program_id(0)
        ins, outs = refs[: len(arrays)], refs[len(arrays) :]

        @pl.when(program >= first_routed)
        def _() -> None:
            _gates_of_row(joint, behind, slots, ins[:count], outs[0], program - first_routed)

        if not of_tokens:
            return

        @pl.when(program < of_tokens)
        def _() -> None:
            _gates_of_tokens(gate, last, ins[count:end], outs[1], program)

        @pl.when((program >= of_tokens) & (program < first_routed))
        def _() -> None:
            token = program - of_tokens
            tokens_ref, gate_ref, *given = ins[end:]
            given_ref = given[0] if given else None
            warps = config.gate_up.num_warps
            outs[2][token, 0] = gates.strength(tokens_ref, token, gate_ref, given_ref, warps)

    return tuple(
        triton_call(
            kernel,
            num_warps=config.gate_up.num_warps,
            num_stages=config.gate_up.num_stages,
            name="expert_dispatch_gate_up",
            grid=(first_routed + rows * joint.tiles,),
            out_shape=shapes,
        )(*arrays)
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
    arrays = [made, order.experts, order.slots, *joint.arrays]
    count, shapes = len(arrays), [jax.ShapeDtypeStruct((rows, width), jnp.float32)]
    last, of_tokens = joint, 0
    if shared is not None:
        last = _own(shared, config)[2]
        own_made, strength = own
        tokens = strength.shape[0]
        of_tokens = pl.cdiv(tokens, last.cut.rows) * last.tiles
        arrays += [own_made, *last.arrays, strength]
        shapes.append(jax.ShapeDtypeStruct((tokens, width), jnp.float32))

    def kernel(*refs: Any) -> None:
        program = pl.program_id(0)
        ins, outs = refs[: len(arrays)], refs[len(arrays) :]

        @pl.when(program >= of_tokens)
        def _() -> None:
            _outputs_of_row(joint, ins[:count], outs[0], program - of_tokens)

        if not of_tokens:
            return

        @pl.when(program < of_tokens)
        def _() -> None:
            _outputs_of_tokens(last, ins[count:], outs[1], program)

    return tuple(
        triton_call(
            kernel,
            num_warps=config.down.num_warps,
            num_stages=config.down.num_stages,
            name="expert_dispatch_down",
            grid=(of_tokens + rows * joint.tiles,),
            out_shape=shapes,
        )(*arrays)
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
        behind.store(out_ref, mine, first, _silu(joint.products(matrices, first, inputs)))


def _gates_of_tokens(
    gate: Joint, last: Joint, ins: Sequence[Any], out_ref: Any, index: Any
) -> None:
    """Gates of the shared expert, of some tokens; see `_gates_of_row`."""
    x_ref, *of_both = ins
    tile, first = gate.place(index)
    mine = gate.rows_of(tile)
    half = len(of_both) // 2
    matrices = [(of_both[:half], 0), (of_both[half:], 0)]
    made = gate.products(matrices, first, gate.inputs(x_ref, mine, 1))
    last.store(out_ref, mine, first, _silu(made))


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


def _outputs_of_tokens(last: Joint, ins: Sequence[Any], out_ref: Any, index: Any) -> None:
    """The shared expert's down projections of some tokens, times their strengths."""
    made_ref, *of_own, strength_ref = ins
    tile, first = last.place(index)
    mine = last.rows_of(tile)
    [y] = last.products([(of_own, 0)], first, last.inputs(made_ref, mine, 1))
    last.store_plainly(out_ref, mine, first, y * last.of_rows(strength_ref, mine))


def _gates(weight: QTensor, config: SomeTokens) -> Joint:
    """Gates and the rows above of all experts; as many outputs as there are gates."""
    return Joint.of(weight, weight.shape[1] // 2, config.gate_up)


def _own(shared: SharedExpert, config: SomeTokens) -> tuple[Joint, Joint, Joint]:
    """The shared expert's gate, up and down projections, which are in codes."""

    def joint(weight: Any, cut: SomeRows) -> Joint:
        return Joint.of(weight, weight.shape[0], cut)

    gate, up = (joint(weight, config.shared) for weight in (shared.gate_proj, shared.up_proj))
    return gate, up, joint(shared.down_proj, config.shared_down)


def _silu(products: list[Float[Array, "o m"]]) -> Float[Array, "o m"]:
    gate, up = products
    return (gate * jax.lax.logistic(gate) * up).astype(jnp.bfloat16)
