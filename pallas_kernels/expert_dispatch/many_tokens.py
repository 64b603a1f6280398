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
from ..dequant_matmul.pieces import Piece
from ..dequant_matmul.qtensor import QTensor
from . import combine, grouped, sorting
from .grouped import Part
from .many_tokens_config import ManyTokens
from .shared import SharedExpert
from .shared_products import shared_products
from .sorting import Tiles
from .stack import Coded, Plain, stack_of

PART_BYTES = 1 << 28


def many_tokens(
    x: Float[Array, "M D"],
    ids: Int[Array, "M A"],
    weights: Float[Array, "M A"],
    gate_up_proj: Float[Array, "E F2 D"] | QTensor,
    down_proj: Float[Array, "E D F"] | QTensor,
    shared: SharedExpert | None,
    residual: Float[Array, "M D"] | None,
    inner_dtype: Any,
    dtype: Any,
    config: ManyTokens,
) -> Float[Array, "M D"]:
    """See `api.expert_dispatch`; `inner_dtype` is bfloat16."""
    x = x.astype(inner_dtype)
    tiles = sorting.sort(ids, down_proj.shape[0], config.rows)
    made = gated(x, ids.shape[1], tiles, gate_up_proj, config)
    y = down(made, tiles, down_proj, config)
    beside = None if shared is None else shared_products(x, shared, inner_dtype)
    return combine.summed(y, ids, weights, down_proj.shape[0], dtype, beside, residual)


def gated(
    x: Float[Array, "M D"],
    slots: int,
    tiles: Tiles,
    weight: Float[Array, "E F2 D"] | QTensor,
    config: ManyTokens,
) -> Float[Array, "S F"]:
    """Silu(gate) * up of each place.

    Args:
        x: tokens.
        slots: of each token.
        tiles: of them.
        weight: gates and the rows above of all experts.
        config: see there.
    """
    hidden = weight.shape[1] // 2

    def run(part: Part, made: Array | None) -> Array:
        return grouped.gated(x, slots, tiles, config.rows, part, hidden, config.gate_up, made)

    return _in_parts(weight, config, run)


def down(
    made: Float[Array, "S F"],
    tiles: Tiles,
    weight: Float[Array, "E D F"] | QTensor,
    config: ManyTokens,
) -> Float[Array, "S D"]:
    """Down projections of all places, by slot.

    Args:
        made: by `gated`.
        tiles: of slots.
        weight: of all experts.
        config: see there.
    """
    width = weight.shape[1]

    def run(part: Part, y: Array | None) -> Array:
        return grouped.down(made, tiles, config.rows, part, width, made.dtype, config.down, y)

    return _in_parts(weight, config, run)


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
    piece = Piece(stack.of_all(experts), tuple(arrays))
    matrices = unpacked.matrix(piece, start, count * outputs, Unpacked())
    return Part(Plain(inputs), [matrices], first, count, count == experts)
