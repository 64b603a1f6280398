"""Rows times matrices that are stored as codes of 3, 4 or 8 bits."""

from __future__ import annotations

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from ..dispatch import REFERENCE, Implementation, Operation
from . import mosaic_gpu, reference, triton
from .qtensor import QTensor

OPERATION = Operation(
    "dequant_matmul",
    {
        "mosaic_gpu": Implementation(mosaic_gpu.dequant_matmul, mosaic_gpu.refusals),
        "triton": Implementation(triton.dequant_matmul, triton.refusals),
        REFERENCE: Implementation(reference.dequant_matmul, reference.refusals),
    },
)


def dequant_matmul(
    x: Float[Array, "... I"],
    weights: tuple[Float[Array, "_O I"] | QTensor, ...],
    *,
    dtype: DTypeLike | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "... _O"], ...]:
    """The products x W^T with matrices that share their input, summed in float32, rounded once.

    Up to 64 rows they are one launch, whatever their bits, groups and outputs; from 5 rows on, one
    for each way in which programs are cut. From 65 rows on each is a product of its own.

    Args:
        x: rows.
        weights: matrices in codes (without an `input_scale`, which is a factor of x). One that is
            an array is multiplied as it is: put it beside others, where it costs no launch.
        dtype: of the results; x's if None.
        implementation: "mosaic_gpu", "triton", "reference", or None for the first that takes it.

    Returns:
        A product for each matrix.

    Raises:
        ExceptionGroup: no implementation takes the call, or the named one does not; it says why.
    """
    return OPERATION(x, weights, dtype=jnp.dtype(dtype or x.dtype), implementation=implementation)
