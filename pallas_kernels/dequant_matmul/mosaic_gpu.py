"""The Mosaic GPU implementation, of some rows: what it takes, and its launches.

Matrices of one format are one launch, see `stream`. What is beside them in other formats, or no
codes at all, is Triton's.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from .._compat import Target, current_target, mosaic_refusals
from . import reference, triton
from .qtensor import QTensor
from .stream import GROUP_SIZES, Stream, fitting
from .stream_launch import products
from .tensor_cores import TILE

LEAST_ROWS, MOST_ROWS = 5, 64


def refusals(target: Target, x: Any, weights: Any, *, dtype: Any) -> list[str]:
    """Why it does not take a call; see `dispatch.Implementation`."""
    # What means nothing is for all kernels.
    reasons = mosaic_refusals(target) + reference.refusals(target, x, weights, dtype=dtype)
    rows = x.size // x.shape[-1]
    if not LEAST_ROWS <= rows <= MOST_ROWS:
        reasons.append(f"x has {rows} rows; it is for {LEAST_ROWS} to {MOST_ROWS}")
    reasons = reasons or triton.refusals(target, x, weights, dtype=dtype)
    if reasons or _streams(target, rows, weights):
        return reasons
    return ["none of the weights is of a format and a size that are streamed"]


def dequant_matmul(
    x: Float[Array, "... I"],
    weights: tuple[Float[Array, "_O I"] | QTensor, ...],
    *,
    dtype: Any,
) -> tuple[Float[Array, "... _O"], ...]:
    """See `api.dequant_matmul`."""
    target, flat = current_target(), x.reshape(-1, x.shape[-1])
    results: dict[int, Array] = {}
    for stream, which in _streams(target, flat.shape[0], weights):
        coded: list[Any] = [weights[index] for index in which]
        made = products(stream, flat, coded, dtype, target)
        results |= dict(zip(which, made, strict=True))
    others = [index for index in range(len(weights)) if index not in results]
    if others:
        made = triton.dequant_matmul(flat, tuple(weights[i] for i in others), dtype=dtype)
        results |= dict(zip(others, made, strict=True))
    return tuple(
        results[index].reshape(*x.shape[:-1], weight.shape[0])
        for index, weight in enumerate(weights)
    )


def _streams(target: Target, rows: int, weights: Any) -> list[tuple[Stream, list[int]]]:
    """Launches, and which matrices each is of."""
    alike: dict[tuple[int, int], list[int]] = {}
    for index, weight in enumerate(weights):
        if (
            isinstance(weight, QTensor)
            and weight.group_size in GROUP_SIZES[weight.bits]
            and weight.zero is None
            and weight.input_scale is None
            and weight.scale.dtype == jnp.bfloat16
            and weight.shape[0] % TILE == 0
        ):
            alike.setdefault((weight.bits, weight.group_size), []).append(index)
    found = []
    memory = target.shared_memory
    for kind, which in alike.items():
        outputs = tuple(weights[index].shape[0] for index in which)
        stream = fitting(*kind, rows, weights[which[0]].inputs, outputs, target.cores, memory)
        if stream is not None:
            found.append((stream, which))
    return found
