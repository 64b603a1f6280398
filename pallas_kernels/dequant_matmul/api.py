"""Rows times a matrix that is stored as codes of 3, 4 or 8 bits."""

from __future__ import annotations

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt

from ..dispatch import REFERENCE, Implementation, Operation
from . import reference, triton

OPERATION = Operation(
    "dequant_matmul",
    {
        "triton": Implementation(triton.dequant_matmul, triton.refusals),
        REFERENCE: Implementation(reference.dequant_matmul, reference.refusals),
    },
)


def dequant_matmul(
    x: Float[Array, "... I"],
    codes: UInt[Array, "O Q U"],
    scale: Float[Array, "O J"],
    zero: Float[Array, "O J"] | None = None,
    *,
    group_size: int,
    dtype: DTypeLike | None = None,
    implementation: str | None = None,
) -> Float[Array, "... O"]:
    """The product x W^T, summed in float32 and rounded once.

    W[o, i] is scale * (code - zero), see `layout`. Matrices that share their input are one call:
    put them below each other, along O.

    Args:
        x: rows.
        codes: words of `layout.pack`; their second axis is the bits.
        scale: of each group.
        zero: what code is 0, of each group; the middle (`layout.CENTRES`) if None.
        group_size: inputs a group, 32, 64 or 128.
        dtype: of the result; x's if None.
        implementation: "triton", "reference", or None for the first that takes the call.

    Raises:
        ExceptionGroup: no implementation takes the call, or the named one does not; it says why.
    """
    return OPERATION(
        x,
        codes,
        scale,
        zero,
        group_size=group_size,
        dtype=jnp.dtype(dtype or x.dtype),
        implementation=implementation,
    )
