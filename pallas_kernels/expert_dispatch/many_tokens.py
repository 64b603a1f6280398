"""More than 64 tokens: slots are sorted by expert, and tiles of one expert each are multiplied.

What the two products make lies by place and by slot, so nothing is added to by two programs, and
memory follows the tokens: A * M * (F + D) numbers in bfloat16. Matrices in codes are decoded for
each tile; or, where tiles are full, made in bfloat16 first, so many experts at a time that no more
than `PART_BYTES` of them exist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..dequant_matmul import unpacked
from ..dequant_matmul.config import Unpacked
from ..dequant_matmul.qtensor import QTensor
from . import grouped, sorting
from .grouped import Part
from .many_tokens_config import ManyTokens
from .stack import Coded, Plain, stack_of

PART_BYTES = 1 << 28


def many_tokens(
    x: Float[Array, "M D"],
    ids: Int[Array, "M A"],
    weights: Float[Array, "M A"],
    gate_up_proj: Float[Array, "E F2 D"] | QTensor,
    down_proj: Float[Array, "E D F"] | QTensor,
    dtype: Any,
    config: ManyTokens,
) -> Float[Array, "M D"]:
    """See `api.expert_dispatch`; without a shared expert. X is in bfloat16, which also slots are."""
    tokens, slots = ids.shape
    experts, width, hidden = down_proj.shape
    tiles = sorting.sort(ids, experts, config.rows)

    def gated(part: Part, made: Array | None) -> Array:
        return grouped.gated(x, slots, tiles, config.rows, part, hidden, config.gate_up, made)

    made = _in_parts(gate_up_proj, config, gated)

    def down(part: Part, y: Array | None) -> Array:
        return grouped.down(made, tiles, config.rows, part, width, x.dtype, config.down, y)

    y = _in_parts(down_proj, config, down).reshape(tokens, slots, width)
    filled = (ids >= 0) & (ids < experts)
    # Slots that are not filled hold whatever was in memory.
    strength = jnp.where(filled, weights, 0.0)[..., None]
    y = jnp.where(filled[..., None], y.astype(jnp.float32) * strength, 0.0)
    return jnp.sum(y, axis=1).astype(dtype)


def _in_parts(
    weight: Float[Array, "E O I"] | QTensor,
    config: ManyTokens,
    run: Callable[[Part, Array | None], Array],
) -> Array:
    """A product with all matrices of a stack, one part after the other into the same array."""
    if not (config.unpacked and isinstance(weight, QTensor)):
        stack, arrays = stack_of(weight)
        return run(Part(stack, arrays, 0, weight.shape[0], True), None)
    y = None
    for first, count in _parts(*weight.shape):
        start = jnp.int32(first * weight.shape[1])
        if y is not None:
            # A part is made when the one before is done with, or all would be there at once.
            start, y = jax.lax.optimization_barrier((start, y))
        y = run(_made(weight, start, first, count), y)
    assert y is not None
    return y


def _parts(experts: int, outputs: int, inputs: int) -> Iterator[tuple[int, int]]:
    """First expert and number of experts of each part."""
    most = max(1, PART_BYTES // (2 * outputs * inputs))
    for first in range(0, experts, most):
        yield first, min(most, experts - first)


def _made(weight: QTensor, start: Int[Array, ""], first: int, count: int) -> Part:
    """Matrices of some experts in bfloat16.

    Args:
        weight: all of them, in codes.
        start: output, of all experts' outputs, where they begin.
        first: expert.
        count: of experts.
    """
    stack, arrays = stack_of(weight)
    assert isinstance(stack, Coded)
    experts, outputs, inputs = weight.shape
    matrices = unpacked.matrix(
        stack.of_all(experts), start, count * outputs, tuple(arrays), Unpacked()
    )
    return Part(Plain(inputs), [matrices], first, count, count == experts)
