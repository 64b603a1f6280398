"""The Triton implementation: what it takes, and the call of its kernel."""

from __future__ import annotations

from typing import Any

from jaxtyping import Array, Float, Int

from .._compat import Target, current_target, triton_refusals
from ..attention.cut import Cut, cut_for
from ..attention.heads import head_refusals
from . import reference
from .kernel import attend_causally


def refusals(
    target: Target, q: Any, k: Any, v: Any, cu_seqlens: Any = None, *, window: int | None
) -> list[str]:
    """Why the kernel does not take a call; see `dispatch.Implementation`."""
    reasons = triton_refusals(target)
    reasons += reference.refusals(target, q, k, v, cu_seqlens, window=window)
    batch, length, heads, width = q.shape
    reasons += head_refusals(width, "queries, keys and values", (x.dtype for x in (q, k, v)))
    if batch * length * heads >= 2**31:
        reasons.append(f"there are {batch * length * heads} rows of queries, 2^31 or more")
    return reasons


def flash_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    cu_seqlens: Int[Array, " C1"] | None = None,
    *,
    window: int | None,
    cut: Cut | None = None,
) -> Float[Array, "B T N H"]:
    """See `api.flash_attention`; `cut` is that of `cut_for` if None."""
    if cut is None:
        cut = cut_for(current_target(), q, k.shape[2])
    first = None
    if cu_seqlens is not None:
        first = reference.first_visible(cu_seqlens, q.shape[1])
    return attend_causally(q, k, v, first, window=window, cut=cut)
