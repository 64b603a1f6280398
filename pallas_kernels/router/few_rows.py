"""Logits of few rows: on CUDA cores, one fused multiply-add a product.

The threads of a warp share columns, some neighbours at a time, which each meets with those of
several experts; their sums meet at the end. Tensor cores take eight rows at least, and float32
weights only rounded to TF32; see `some_rows` for where they are used.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from .._compat import INTERPRETER, assembled, current_target, multiply_add, triton_call
from ..lanes import parts
from .config import FewRows

LANES = 32
LOAD_BYTES = 16
# About so many products a thread are unrolled: more would be a longer program, not a faster one.
UNROLLED = 512


def product(
    x: Float[Array, "M D"], weight: Float[Array, "E D"], config: FewRows
) -> Float[Array, "M E"]:
    """The logits; see `reference.product`."""
    (rows, width), experts = x.shape, weight.shape[0]
    piece = LOAD_BYTES // weight.dtype.itemsize
    pairs = config.rows * config.experts
    tile = config.num_warps // config.parts, config.parts, LANES, piece
    columns = config.parts * LANES * piece
    steps = pl.cdiv(width, columns)
    at_once = max(1, min(steps, UNROLLED // (pairs * piece)))

    def kernel(x_ref: Any, weight_ref: Any, out_ref: Any) -> None:
        row, expert = _places(config, tile)
        row = [jnp.minimum(r, rows - 1) for r in row]
        expert = [jnp.minimum(e, experts - 1) for e in expert]
        inner = (_iota(tile, 1) * LANES + _iota(tile, 2)) * piece + _iota(tile, 3)

        def read(ref: Any, index: Array, step: Any) -> list[Array]:
            """Neighbours of a row, one array for each that a thread has."""
            column = step * columns + inner
            mask = None if width % (columns * at_once) == 0 else column < width
            other = None if mask is None else 0.0
            numbers = plt.load(ref.at[index, column], mask=mask, other=other)
            return [part.astype(jnp.float32) for part in parts(numbers)]

        def add(turn: Any, sums: tuple[Array, ...]) -> tuple[Array, ...]:
            found = list(sums)
            for step in range(at_once):
                at = turn * at_once + step
                weights = [read(weight_ref, e, at) for e in expert]
                for index, r in enumerate(row):
                    numbers = read(x_ref, r, at)
                    for e, others in enumerate(weights):
                        pair = index * config.experts + e
                        found[pair] = _added(found[pair], numbers, others)
            return tuple(found)

        sums = (jnp.zeros(tile[:3], jnp.float32),) * pairs
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
        grid=(pl.cdiv(rows, config.rows), pl.cdiv(experts, tile[0] * config.experts)),
        out_shape=jax.ShapeDtypeStruct((rows, experts), jnp.float32),
    )(x, weight)


def _iota(tile: tuple[int, ...], axis: int) -> Int[Array, "..."]:
    return jax.lax.broadcasted_iota(jnp.int32, tile, axis)


def _places(config: FewRows, tile: tuple[int, ...]) -> tuple[list[Array], list[Array]]:
    """The rows of a program, and the experts of its warps; some may be past the end."""
    row = [pl.program_id(0) * config.rows + i for i in range(config.rows)]
    first = (pl.program_id(1) * tile[0] + _iota(tile, 0)) * config.experts
    return [jnp.full(tile, r, jnp.int32) for r in row], [first + i for i in range(config.experts)]


def _added(
    total: Float[Array, "w p u"], xs: list[Float[Array, "w p u"]], ys: list[Float[Array, "w p u"]]
) -> Float[Array, "w p u"]:
    """The total and the products, added one after the other."""
    if current_target().platform == INTERPRETER:
        for x, y in zip(xs, ys, strict=True):
            total = multiply_add(x, y, total)
        return total
    # All in one, since a kernel of a thousand operations takes seconds to compile.
    count = len(xs)
    lines = [f"fma.rn.f32 sum, ${2 + index}, ${2 + count + index}, sum;" for index in range(count)]
    text = " ".join(["{ .reg .f32 sum; mov.f32 sum, $1;", *lines, "mov.f32 $0, sum; }"])
    return assembled(text, [total, *xs, *ys], ",".join(["=f", *["f"] * (1 + 2 * count)]))


def _store(out_ref: Any, sums: tuple[Float[Array, "w p u"], ...], config: FewRows) -> None:
    """Add over the threads that share columns and write.

    Args:
        out_ref: the logits.
        sums: of each row of the program, the experts of a warp.
        config: see there.
    """
    rows, experts = out_ref.shape
    # Like the sums, so that nothing goes from thread to thread: a pair of row and expert a lane.
    tile = (*sums[0].shape[:2], LANES)
    pair = _iota(tile, 2)
    together = jnp.zeros(tile, jnp.float32)
    for index, total in enumerate(sums):
        whole = jnp.broadcast_to(jnp.sum(total, axis=2, keepdims=True), tile)
        together = jnp.where(pair == index, whole, together)
    flat = tile[0], tile[2]
    pair = _iota(flat, 1)
    row = pl.program_id(0) * config.rows + pair // config.experts
    first = (pl.program_id(1) * flat[0] + _iota(flat, 0)) * config.experts
    expert = first + pair % config.experts
    exists = (pair < len(sums)) & (row < rows) & (expert < experts)
    plt.store(out_ref.at[row, expert], jnp.sum(together, axis=1), mask=exists)
