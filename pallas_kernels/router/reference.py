"""The definition in plain jax.numpy."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .._compat import Target


class RouterOutput(NamedTuple):
    """See `api.router`."""

    ids: Array
    weights: Array
    logits: Array


def router(
    x: Float[Array, "M D"],
    weight: Float[Array, "E D"],
    bias: Float[Array, "R E"] | None,
    mask: Bool[Array, "Q E"] | None,
    valid: Bool[Array, " M"] | None,
    limit: Int[Array, " M"] | None,
    temperature: Float[Array, " M"] | None,
    forced: Bool[Array, "F E"] | None = None,
    scale: Float[Array, "S E"] | None = None,
    part: Int[Array, "1"] | None = None,
    *,
    slots: int,
    renormalise: bool,
) -> RouterOutput:
    """See `api.router`; R, Q, F and S are M or 1, or a multiple of M where there is a part."""
    if part is not None:
        rows, each = x.shape[0], (bias, mask, forced, scale)
        bias, mask, forced, scale = (None if a is None else _part(a, part, rows) for a in each)
    logits = product(x, weight)
    scores = logits
    if bias is not None:
        scores = scores + jnp.broadcast_to(bias, logits.shape)
    if temperature is not None:
        scores = scores / jnp.broadcast_to(temperature[:, None], logits.shape)
    if mask is not None:
        scores = jnp.where(mask, scores, -jnp.inf)
    # Sorting tells zeros apart by their sign.
    rank = jnp.where(scores == 0, 0.0, jnp.where(jnp.isnan(scores), jnp.inf, scores))
    rank = jax.lax.stop_gradient(rank)
    if forced is None:
        best, ids = jax.lax.top_k(rank, slots)
    else:
        first = jnp.where(forced, jnp.inf, rank)
        first = first if mask is None else jnp.where(mask, first, -jnp.inf)
        # A score of infinity comes behind all that are forced.
        ids = jnp.lexsort((~jnp.broadcast_to(forced, first.shape), -first), axis=1)[:, :slots]
        best = jnp.take_along_axis(first, ids, axis=1)
    filled = best > -jnp.inf
    if limit is not None:
        filled &= jnp.arange(slots, dtype=jnp.int32)[None, :] < limit[:, None]
    if valid is not None:
        filled &= valid[:, None]
    if forced is not None:
        best = jnp.where(filled, jnp.take_along_axis(rank, ids, axis=1), -jnp.inf)
        order = jnp.lexsort((jnp.where(filled, ids, weight.shape[0]), -best), axis=1)
        best, ids, filled = (jnp.take_along_axis(each, order, 1) for each in (best, ids, filled))
    # Of those that are added up. Where nothing is filled this is 0, as it must be nothing that
    # makes NaN of a gradient.
    largest = best[:, :1] if renormalise else jnp.max(rank, axis=1, keepdims=True)
    largest = jnp.where(filled[:, :1], largest, 0.0)
    taken = jnp.where(filled, jnp.take_along_axis(scores, ids, axis=1) - largest, -jnp.inf)
    strength = jnp.exp(taken)
    among = strength if renormalise else jnp.exp(scores - largest)
    total = jnp.sum(among, axis=1, keepdims=True)
    weights = jnp.where(filled, strength / jnp.where(filled[:, :1], total, 1.0), 0.0)
    if scale is not None:
        factors = jnp.take_along_axis(jnp.broadcast_to(scale, logits.shape), ids, axis=1)
        weights = jnp.where(filled, weights * factors, 0.0)
    return RouterOutput(jnp.where(filled, ids, weight.shape[0]), weights, logits)


def _part(array: Array, part: Int[Array, "1"], rows: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(array, part[0] * rows, rows)


def product(x: Float[Array, "M D"], weight: Float[Array, "E D"]) -> Float[Array, "M E"]:
    """The logits."""
    x, weight = x.astype(jnp.float32), weight.astype(jnp.float32)
    return jnp.einsum("md,ed->me", x, weight, precision=jax.lax.Precision.HIGHEST)


def refusals(
    target: Target,
    x: Any,
    weight: Any,
    bias: Any,
    mask: Any,
    valid: Any,
    limit: Any,
    temperature: Any,
    forced: Any = None,
    scale: Any = None,
    part: Any = None,
    *,
    slots: int,
    renormalise: bool,
) -> list[str]:
    """What gives a call no meaning; see `dispatch.Implementation`."""
    rows, experts, reasons = x.shape[0], weight.shape[0], []
    if not isinstance(slots, int) or not 1 <= slots <= experts:
        reasons.append(f"slots is {slots}; accepted is 1 to {experts}, the number of experts")
    if part is not None and part.shape != (1,):
        reasons.append(f"part has shape {list(part.shape)}; accepted is [1]")
    rowed = {"bias": bias, "mask": mask, "forced": forced, "scale": scale}
    for name, array in rowed.items():
        if array is None:
            continue
        if part is None and array.shape[0] not in (1, rows):
            reasons.append(
                f"{name} has {array.shape[0]} rows; accepted is 1, or {rows} as there are of x"
            )
        if part is not None and array.shape[0] % rows:
            reasons.append(
                f"{name} has {array.shape[0]} rows; accepted with a part are multiples of {rows}, "
                "as there are of x"
            )
    for name, array in {"bias": bias, "temperature": temperature, "scale": scale}.items():
        if array is not None and array.dtype != jnp.float32:
            reasons.append(f"{name} is {array.dtype}; accepted is float32")
    return reasons
