"""NVIDIA's fused attention, through JAX's public function."""

from __future__ import annotations

import functools
from typing import Any

import jax
from jaxtyping import Array, Float

from .._compat import Target
from ..attention.heads import dtype_refusals
from . import reference

DTYPES = ("bfloat16", "float16")


def refusals(
    target: Target, q: Any, k: Any, v: Any, cu_seqlens: Any = None, *, window: int | None
) -> list[str]:
    """Why cuDNN does not take a call; see `dispatch.Implementation`."""
    reasons = reference.refusals(target, q, k, v, cu_seqlens, window=window)
    if target.platform != "gpu":
        reasons.append(f"it needs a GPU, and the call is for {target.platform}")
    elif target.capability < (8, 0):
        reasons.append(
            "it needs an NVIDIA GPU of compute capability 8.0 or later, and the call is for "
            f"{target.kind}"
        )
    if cu_seqlens is not None:
        reasons.append("it takes no packed sequences")
    dtypes = (x.dtype for x in (q, k, v))
    reasons += dtype_refusals("queries, keys and values", dtypes, DTYPES)
    width, most = q.shape[3], 256 if target.capability >= (9, 0) else 128
    if width > most or width % 8:
        reasons.append(
            f"head dim {width} is not a multiple of 8 up to {most}, which is what it takes on "
            f"{target.kind}"
        )
    return reasons or _refusals_of_jax(q, k, v, window)


def _refusals_of_jax(q: Any, k: Any, v: Any, window: int | None) -> list[str]:
    """What JAX itself says when it traces the call: no cuDNN, say, or too old a one."""
    shapes = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k, v))
    try:
        jax.eval_shape(functools.partial(flash_attention, window=window), *shapes)
    except (RuntimeError, NotImplementedError, ValueError) as error:
        return [str(error).partition("\n")[0]]
    return []


def flash_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    cu_seqlens: None = None,
    *,
    window: int | None,
) -> Float[Array, "B T N H"]:
    """See `api.flash_attention`."""
    return jax.nn.dot_product_attention(
        q,
        k,
        v,
        is_causal=True,
        # JAX counts the tokens before the query, without its own.
        local_window_size=None if window is None else (window - 1, 0),
        implementation="cudnn",
    )
