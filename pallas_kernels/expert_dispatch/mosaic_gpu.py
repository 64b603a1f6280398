"""The Mosaic GPU implementation, of tokens that share experts: what it takes, and its launches.

Up to 64 tokens a launch makes the table of slots and brings tokens into order, and two stream the
routed experts' codes (see `stream`). Above, three sort slots into tiles, one brings tokens into
order, and two stream codes past those (see `tile_stream`). The shared expert's are dense products,
and the last launch sums.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .._compat import Target, current_target, mosaic_refusals
from ..dequant_matmul.qtensor import QTensor
from . import combine, sorting, stream_launch, tile_launch, tile_stream, triton
from .config import FEW_TOKENS
from .order import in_order, ordered
from .shared import SharedExpert
from .shared_products import shared_products
from .stream import BITS, GROUP_SIZES, MOST_EXPERTS, ROWS, TURN, streams
from .tile_stream import tile_streams

# On an H200, a decode step of four layers of qwen3.6-35b-a3b takes 976 us so in place of 1,067 at
# 32 tokens, 737 in place of 805 at 16, and 605 in place of 617 at 8.
LEAST_TOKENS = 8


def refusals(target: Target, *arrays: Any, **settings: Any) -> list[str]:
    """Why it does not take a call; see `dispatch.Implementation`."""
    reasons = mosaic_refusals(target)
    x, ids, _, gate_up_proj, down_proj, *_ = arrays
    if x.shape[0] < LEAST_TOKENS:
        reasons.append(f"x has {x.shape[0]} tokens; it is for {LEAST_TOKENS} or more")
    if str(settings["inner_dtype"]) != "bfloat16":
        reasons.append(f"inner_dtype is {settings['inner_dtype']}, not bfloat16")
    stacks = {"gate_up_proj": gate_up_proj, "down_proj": down_proj}
    for name, stack in stacks.items():
        reasons += _oddities(name, stack)
    # Sizes of what is none of its calls say nothing; and what has no meaning, or is too large, is
    # for all kernels.
    return (
        reasons
        or _misfits(gate_up_proj, down_proj, ids, target)
        or triton.refusals(target, *arrays, **settings)
    )


def _misfits(gate_up_proj: QTensor, down_proj: QTensor, ids: Any, target: Target) -> list[str]:
    """Why sizes cannot be streamed."""
    stacks, memory, programs = (gate_up_proj, down_proj), target.shared_memory, target.cores
    if ids.shape[0] <= FEW_TOKENS:
        reasons = [each.oddities(memory) for each in streams(*stacks, ids, memory)]
    else:
        both = tile_streams(*stacks, ids, memory, programs)
        reasons = [each.oddities(memory, programs) for each in both]
    return [
        f"{name}: {reason}"
        for name, own in zip(("gate_up_proj", "down_proj"), reasons, strict=True)
        for reason in own
    ]


def _oddities(name: str, stack: Any) -> list[str]:
    """What of a stack's format it does not take."""
    if not isinstance(stack, QTensor):
        return [f"{name} is not in codes"]
    reasons = []
    if stack.bits not in BITS:
        reasons.append(f"{name} has codes of {stack.bits} bits, not {BITS}")
    if stack.group_size not in GROUP_SIZES:
        reasons.append(f"{name} has groups of {stack.group_size}, not {GROUP_SIZES}")
    if stack.zero is not None:
        reasons.append(f"{name} has zero points")
    if stack.shape[0] > MOST_EXPERTS:
        reasons.append(f"{name} has {stack.shape[0]} experts, more than {MOST_EXPERTS}")
    if str(stack.scale.dtype) != "bfloat16":
        reasons.append(f"{name}.scale is {stack.scale.dtype}, not bfloat16")
    return reasons


def expert_dispatch(
    x: Float[Array, "M D"],
    ids: Int[Array, "M A"],
    weights: Float[Array, "M A"],
    gate_up_proj: QTensor,
    down_proj: QTensor,
    shared: SharedExpert | None = None,
    residual: Float[Array, "M D"] | None = None,
    *,
    inner_dtype: Any,
    dtype: Any,
) -> Float[Array, "M D"]:
    """See `api.expert_dispatch`."""
    assert jnp.dtype(inner_dtype) == jnp.bfloat16
    streamed = _few if x.shape[0] <= FEW_TOKENS else _many
    y = streamed(current_target(), x, ids, gate_up_proj, down_proj)
    beside = None
    if shared is not None:
        beside = shared_products(x, shared, inner_dtype)
    return combine.summed(y, ids, weights, down_proj.shape[0], dtype, beside, residual)


def _few(
    target: Target, x: Array, ids: Array, gate_up_proj: QTensor, down_proj: QTensor
) -> Float[Array, "S D"]:
    """What each slot makes, up to 64 tokens."""
    order = ordered(x, ids, down_proj.shape[0], ROWS, [(TURN, x.shape[1])])
    gates, outputs = streams(gate_up_proj, down_proj, ids, target.shared_memory)
    table = order.experts, order.slots
    made = stream_launch.products(
        gates, order.inputs[0], *table, gate_up_proj, target, "expert_dispatch_gate_up"
    )
    return stream_launch.products(outputs, made, *table, down_proj, target, "expert_dispatch_down")


def _many(
    target: Target, x: Array, ids: Array, gate_up_proj: QTensor, down_proj: QTensor
) -> Float[Array, "S D"]:
    """What each slot makes, above."""
    gates, outputs = tile_streams(gate_up_proj, down_proj, ids, target.shared_memory, target.cores)
    tiles = sorting.sort(ids, down_proj.shape[0], gates.rows)
    x = in_order(x, tile_stream.order_of(gate_up_proj))
    made = tile_launch.products(gates, x, tiles, gate_up_proj, target, "expert_dispatch_gated")
    return tile_launch.products(outputs, made, tiles, down_proj, target, "expert_dispatch_down")
