"""The definition in plain jax.numpy."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._compat import Target
from .layout import dequantise
from .qtensor import QTensor

# The head of a large vocabulary would be gigabytes.
_VALUES_AT_ONCE = 1 << 26


def dequant_matmul(
    x: Float[Array, "... I"],
    weights: tuple[Float[Array, "_O I"] | QTensor, ...],
    *,
    dtype: Any,
) -> tuple[Float[Array, "... _O"], ...]:
    """See `api.dequant_matmul`."""
    return tuple(_product(x.astype(jnp.float32), weight, dtype) for weight in weights)


def refusals(target: Target, x: Any, weights: Any, *, dtype: Any) -> list[str]:
    """What gives a call no meaning; see `dispatch.Implementation`."""
    reasons = []
    for index, weight in enumerate(weights):
        if not isinstance(weight, QTensor):
            continue
        reasons += [f"weights[{index}]: {reason}" for reason in weight.contradictions()]
        if weight.input_scale is not None:
            reasons.append(
                f"weights[{index}] has an input_scale, so that it shares no input; multiply x by "
                "it, and give the matrix without it"
            )
    if not jnp.issubdtype(dtype, jnp.floating):
        reasons.append(f"dtype is {dtype}; accepted is floating point")
    return reasons


def _product(
    x: Float[Array, "... I"], weight: Float[Array, "O I"] | QTensor, dtype: Any
) -> Float[Array, "... O"]:
    def product(matrix: Float[Array, "o I"]) -> Float[Array, "... o"]:
        return jnp.einsum("...i,oi->...o", x, matrix, precision=jax.lax.Precision.HIGHEST)

    if not isinstance(weight, QTensor):
        return product(weight.astype(jnp.float32)).astype(dtype)
    inputs, group_size = weight.inputs, weight.group_size

    def of_part(part: tuple[Array, Array, Array | None]) -> Float[Array, "... o"]:
        return product(dequantise(*part, inputs, group_size))

    parts = weight.codes, weight.scale, weight.zero
    at_once = max(1, _VALUES_AT_ONCE // x.shape[-1])
    if weight.shape[0] <= at_once:
        return of_part(parts).astype(dtype)
    # One output of a part is a matrix of one row.
    rows = jax.lax.map(
        lambda part: of_part(jax.tree.map(lambda leaf: leaf[None], part))[..., 0].astype(dtype),
        parts,
        batch_size=at_once,
    )
    return jnp.moveaxis(rows, 0, -1)
