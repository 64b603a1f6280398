"""Logits of few rows: on CUDA cores, one fused multiply-add a product.

The threads of a warp share the columns, some neighbours at a time, which each meets with those of
several experts; their sums meet at the end. In what order products are added depends on nothing but
the width, so that a row's logits are the same bits whatever rows are beside it. Tensor cores would
round to TF32.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float

from .._compat import INTERPRETER, assembled, current_target, multiply_add, triton_call
from ..lanes import parts
from .config import Config

LANES = 32
LOAD_BYTES = 16


def product(
    x: Float[Array, "M D"], weight: Float[Array, "E D"], config: Config
) -> Float[Array, "M E"]:
    """The logits; see `reference.product`."""
    (rows, width), experts = x.shape, weight.shape[0]
    piece = LOAD_BYTES // weight.dtype.itemsize
    tile = config.num_warps, LANES, piece
    steps = pl.cdiv(width, LANES * piece)
    at_once = min(config.steps, steps)

    def kernel(x_ref: Any, weight_ref: Any, out_ref: Any) -> None:
        warp = jax.lax.broadcasted_iota(jnp.int32, tile, 0)
        row = [pl.program_id(0) * config.rows + i for i in range(config.rows)]
        first = (pl.program_id(1) * config.num_warps + warp) * config.experts
        expert = [jnp.minimum(first + i, experts - 1) for i in range(config.experts)]

        def read(ref: Any, index: Array, step: Any) -> Array:
            """A piece a thread."""
            unit = step * LANES + jax.lax.broadcasted_iota(jnp.int32, tile, 1)
            column = unit * piece + jax.lax.broadcasted_iota(jnp.int32, tile, 2)
            mask = None
            if width % piece:
                mask = column < width
            elif width % (LANES * piece * at_once):
                mask = unit < width // piece
            other = None if mask is None else 0.0
            return plt.load(ref.at[index, column], mask=mask, other=other)

        def add(turn: Any, sums: tuple[Array, ...]) -> tuple[Array, ...]:
            found, pieces = list(sums), []
            for step in range(at_once):
                at = turn * at_once + step
                xs = [
                    read(x_ref, jnp.full(tile, jnp.minimum(r, rows - 1), jnp.int32), at)
                    for r in row
                ]
                pieces.append((xs, [read(weight_ref, e, at) for e in expert]))
            for xs, weights in pieces:
                weights = [_numbers(numbers) for numbers in weights]
                for r, numbers in enumerate(map(_numbers, xs)):
                    for e, others in enumerate(weights):
                        pair = r * len(expert) + e
                        found[pair] = _added(found[pair], numbers, others)
            return tuple(found)

        sums = (jnp.zeros(tile[:2], jnp.float32),) * (config.rows * config.experts)
        if at_once == steps:
            sums = add(0, sums)
        else:
            sums = jax.lax.fori_loop(0, pl.cdiv(steps, at_once), add, sums)
        _store(out_ref, sums, config)

    return triton_call(
        kernel,
        num_warps=config.num_warps,
        num_stages=1,
        name="router_logits",
        grid=(pl.cdiv(rows, config.rows), pl.cdiv(experts, config.experts * config.num_warps)),
        out_shape=jax.ShapeDtypeStruct((rows, experts), jnp.float32),
    )(x, weight)


def _numbers(piece: Array) -> list[Float[Array, "w u"]]:
    return [part.astype(jnp.float32) for part in parts(piece)]


def _added(
    total: Float[Array, "w u"], xs: list[Float[Array, "w u"]], ys: list[Float[Array, "w u"]]
) -> Float[Array, "w u"]:
    """The total and the products, added one after the other."""
    if current_target().platform == INTERPRETER:
        for x, y in zip(xs, ys, strict=True):
            total = multiply_add(x, y, total)
        return total
    # All in one, since a kernel of a thousand operations takes seconds to compile.
    count = len(xs)
    lines = [
        f"fma.rn.f32 sum, ${2 + index}, ${2 + count + index}, sum;" for index in range(count)
    ]
    text = " ".join(["{ .reg .f32 sum; mov.f32 sum, $1;", *lines, "mov.f32 $0, sum; }"])
    return assembled(text, [total, *xs, *ys], ",".join(["=f", *["f"] * (1 + 2 * count)]))


def _store(out_ref: Any, sums: tuple[Float[Array, "w u"], ...], config: Config) -> None:
    """Add over the threads of a warp and write.

    Args:
        out_ref: the logits.
        sums: of each row of the program, the experts of a warp.
        config: see there.
    """
    rows, experts = out_ref.shape
    # Laid out as the sums are, one pair of row and expert a thread.
    tile = config.num_warps, max(LANES, len(sums))
    warp, pair = (jax.lax.broadcasted_iota(jnp.int32, tile, axis) for axis in range(2))
    together = jnp.zeros(tile, jnp.float32)
    for index, total in enumerate(sums):
        whole = jnp.broadcast_to(jnp.sum(total, axis=1, keepdims=True), tile)
        together = jnp.where(pair == index, whole, together)
    row = pl.program_id(0) * config.rows + pair // config.experts
    expert = (pl.program_id(1) * config.num_warps + warp) * config.experts + pair % config.experts
    exists = (pair < len(sums)) & (row < rows) & (expert < experts)
    plt.store(out_ref.at[row, expert], together, mask=exists)
