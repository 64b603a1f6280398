"""What the slots of each token made, weighted and summed.

A program has some of a token's columns, and reads them of all its slots before it adds.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from .._compat import triton_call
from ..dequant_matmul.operands import load
from .config import COLUMNS, FEW_TOKENS, WARPS


def summed(
    y: Float[Array, "S D"],
    ids: Int[Array, "M A"],
    weights: Float[Array, "M A"],
    experts: int,
    dtype: Any,
    shared: Float[Array, "M D"] | None = None,
    residual: Float[Array, "M D"] | None = None,
) -> Float[Array, "M D"]:
    """Weighted sum over each token's slots, in float32 and rounded once.

    Args:
        y: of each slot; those that are not filled hold whatever was in memory.
        ids: experts of slots.
        weights: of slots.
        experts: E.
        dtype: of the result.
        shared: what the shared expert adds; None without one.
        residual: what the sum is added to; None for zero.
    """
    (tokens, slots), width = ids.shape, y.shape[1]
    columns = COLUMNS if tokens <= FEW_TOKENS else WARPS * COLUMNS

    def kernel(y_ref: Any, ids_ref: Any, weights_ref: Any, *refs: Any) -> None:
        token = pl.program_id(0)
        column = pl.program_id(1) * columns + jax.lax.iota(jnp.int32, columns)
        inside = column < width if width % columns else None
        row = jnp.full((columns,), token, jnp.int32)
        total = jnp.zeros((columns,), jnp.float32)
        if shared is not None:
            total = load(refs[0], row, column, mask=inside).astype(jnp.float32)
        for slot in range(slots):
            expert, weight = ids_ref[token, slot], weights_ref[token, slot]
            filled = (expert >= 0) & (expert < experts)
            # Read in any case: a load that waits for the expert would wait for memory twice.
            made = load(y_ref, row * slots + slot, column, mask=inside).astype(jnp.float32)
            total = total + jnp.where(filled, made * weight, 0.0)
        if residual is not None:
            total = load(refs[-2], row, column, mask=inside).astype(jnp.float32) + total
        plt.store(refs[-1].at[row, column], total.astype(dtype), mask=inside)

    return triton_call(
        kernel,
        num_warps=columns // COLUMNS,
        num_stages=1,
        name="expert_dispatch_sum",
        grid=(tokens, pl.cdiv(width, columns)),
        out_shape=jax.ShapeDtypeStruct((tokens, width), dtype),
    )(y, ids, weights, *(array for array in (shared, residual) if array is not None))
