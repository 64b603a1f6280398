"""What routers share: logits, the largest scores under an intervention, weights of the chosen."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ...errors import RequestError
from ...model import RouterContext, Routing
from ...model.layer_intervention import at_slots, in_order
from ...whole_number import is_whole


def products(x: Float[Array, "B T D"], weight: Float[Array, "E D"]) -> Float[Array, "B T E"]:
    """Float32 logits x W^T, without TF32."""
    x, weight = x.astype(jnp.float32), weight.astype(jnp.float32)
    return jnp.einsum("btd,ed->bte", x, weight, precision=jax.lax.Precision.HIGHEST)


def checked_k(k: int, experts: int) -> int:
    """K, if a token can take as many experts.

    Raises:
        RequestError: no whole number from 1 to E.
    """
    if not is_whole(k) or not 1 <= k <= experts:
        raise RequestError(
            f"k is {k!r}; accepted is a whole number from 1 to {experts}, the experts"
        )
    return int(k)


def changed(logits: Float[Array, "B T E"], context: RouterContext) -> Float[Array, "B T E"]:
    """Logits with an intervention's bias and temperature; -infinity where it bans."""
    return logits if context.intervention is None else context.intervention.scores(logits)


def largest(
    scores: Float[Array, "B T E"], context: RouterContext, k: int, bound: int | None = None
) -> Int[Array, "B T A"]:
    """The experts of the k largest scores of each token, in falling order; of equals the lower id.

    Forced experts come first, in order of their ids, and banned ones never. Slots behind the k, of
    padding and of scores of -infinity are empty.

    Args:
        scores: float32; NaN ranks as +infinity, as in the released rule.
        context: with valid tokens and an intervention, whose number of experts replaces k.
        k: experts a token.
        bound: most slots, whatever an intervention says; none if None.
    """
    experts, change, slots = scores.shape[-1], context.intervention, k
    scores = jnp.where(jnp.isnan(scores), jnp.inf, scores)
    if change is not None:
        scores = jnp.where(change.banned, -jnp.inf, scores)
        scores = jnp.where(change.forced & (scores > -jnp.inf), jnp.inf, scores)
        slots = max(k, change.slots)
    slots = slots if bound is None else min(slots, bound)
    best, ids = jax.lax.top_k(jax.lax.stop_gradient(scores), slots)
    filled = (best > -jnp.inf) & context.valid[..., None]
    if change is not None:
        slot = jnp.arange(slots, dtype=jnp.int32)[None, None, :]
        filled &= slot < change.most(k)[..., None]
    return jnp.where(filled, ids, experts)


def softmax_of(
    scores: Float[Array, "B T E"], ids: Int[Array, "B T A"], *, renormalise: bool
) -> Float[Array, "B T A"]:
    """Softmax over the chosen experts, or over all and not renormalised; 0 in empty slots."""
    taken = at_slots(scores, ids, -jnp.inf)
    among = taken if renormalise else scores
    # Where nothing is chosen the sum is 0, which must not make NaN of a gradient.
    some = jnp.any(taken > -jnp.inf, axis=-1, keepdims=True)
    largest = jnp.where(some, jnp.max(among, axis=-1, keepdims=True), 0.0)
    total = jnp.sum(jnp.exp(among - largest), axis=-1, keepdims=True)
    return jnp.exp(taken - largest) / jnp.where(some, total, 1.0)


def sorted_routing(
    ids: Int[Array, "B T A"],
    weights: Float[Array, "B T A"],
    logits: Float[Array, "B T E"] | None,
) -> Routing:
    """A routing with its slots in order of falling weight."""
    return in_order(Routing(ids, weights, logits), weights)


def shared_out(
    weights: Float[Array, "B T A"], kept: Bool[Array, "B T A"], *, renormalise: bool
) -> Float[Array, "B T A"]:
    """Weights of the slots that are kept, which take over what the others had if `renormalise`.

    A token that keeps all has its weights bit by bit.
    """
    left = jnp.where(kept, weights, 0.0)
    if not renormalise:
        return left
    total, before = (jnp.sum(each, axis=-1, keepdims=True) for each in (left, weights))
    lost = jnp.any(~kept & (weights > 0), axis=-1, keepdims=True) & (total > 0)
    return jnp.where(lost, left * before / jnp.where(lost, total, 1.0), left)
