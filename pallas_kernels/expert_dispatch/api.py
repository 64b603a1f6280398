"""Routed experts: each token's chosen gated MLPs, weighted and summed; and the shared one."""

from __future__ import annotations

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from ..dequant_matmul.qtensor import QTensor
from ..dispatch import REFERENCE, Implementation, Operation
from . import mosaic_gpu, reference, triton
from .shared import SharedExpert

OPERATION = Operation(
    "expert_dispatch",
    {
        "mosaic_gpu": Implementation(mosaic_gpu.expert_dispatch, mosaic_gpu.refusals),
        "triton": Implementation(triton.expert_dispatch, triton.refusals),
        REFERENCE: Implementation(reference.expert_dispatch, reference.refusals),
    },
)


def expert_dispatch(
    x: Float[Array, "M D"],
    ids: Int[Array, "M A"],
    weights: Float[Array, "M A"],
    gate_up_proj: Float[Array, "E F2 D"] | QTensor,
    down_proj: Float[Array, "E D F"] | QTensor,
    shared: SharedExpert | None = None,
    residual: Float[Array, "M D"] | None = None,
    *,
    inner_dtype: DTypeLike | None = None,
    dtype: DTypeLike | None = None,
    implementation: str | None = None,
) -> Float[Array, "M D"]:
    """Weighted sum of the outputs of each token's chosen experts, and of the shared expert.

    y[m] = sum over slots a of weights[m, a] * down(silu(gate(x[m])) * up(x[m])), with the gate, up
    and down projections of expert ids[m, a]; and sigmoid(gate(x[m])) times the same of the shared
    expert's own projections; and residual[m].

    Args:
        x: tokens.
        ids: chosen experts. An id outside 0..E-1 marks an empty slot, which adds nothing and costs
            no tile.
        weights: float32 weight of each slot, applied to the expert's output.
        gate_up_proj: gate rows 0..F-1, then up rows F..2F-1, of each expert; an array, or a stack
            in codes.
        down_proj: down projection of each expert, likewise.
        shared: the expert that every token goes to; None if there is none.
        residual: what the sum is added to; None for zero.
        inner_dtype: to which what the down projections read is rounded; x's if None. Tokens may be
            rounded to it as well, as tensor cores need it; the kernels read a single one as it is.
        dtype: of the result; x's if None.
        implementation: "mosaic_gpu", "triton", "reference", or None for the first that takes the
            call.

    Returns:
        The weighted sum, accumulated in float32 and rounded once. With more than 64 tokens, the
        kernels round what each slot adds to it to bfloat16, and codes times scales may be, too.

    Raises:
        ExceptionGroup: no implementation takes the call; it says why.
    """
    return OPERATION(
        x,
        ids,
        weights,
        gate_up_proj,
        down_proj,
        shared,
        residual,
        inner_dtype=jnp.dtype(inner_dtype or x.dtype),
        dtype=jnp.dtype(dtype or x.dtype),
        implementation=implementation,
    )
