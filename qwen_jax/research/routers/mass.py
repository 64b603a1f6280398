"""As many experts as it takes to gather a share of the probability.

Huang et al. 2024, arXiv 2403.07652.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from ...errors import RequestError
from ...model import RouterContext, Routing
from ...model.layer_intervention import at_slots
from ...model.routing import TopKRouter
from .choice import changed, shared_out


class MassRouter(nnx.Module):
    """Of an inner router's experts, the first whose probabilities together reach `mass`.

    Probabilities are those of the softmax over all experts. The inner router's k is the most that a
    token takes; one expert is the least. With mass 1 nothing changes, bit by bit. A forced expert
    stays.

    Raises:
        RequestError: a mass outside 0 to 1.
    """

    intervenes = True

    def __init__(self, inner: TopKRouter, mass: float):
        if not 0 < mass <= 1:
            raise RequestError(f"mass is {mass}; accepted is above 0, up to 1")
        self.inner = inner
        self.mass = mass

    def __call__(self, x: Float[Array, "B T D"], context: RouterContext) -> Routing:
        """See the class."""
        routing = self.inner(x, context)
        if self.mass == 1:
            return routing
        assert routing.logits is not None
        experts = routing.logits.shape[-1]
        p = jax.nn.softmax(changed(routing.logits, context), axis=-1)
        of_slots = at_slots(p, routing.ids, 0.0)
        kept = jnp.cumsum(of_slots, axis=-1) - of_slots < self.mass
        if context.intervention is not None:
            kept |= at_slots(context.intervention.forced, routing.ids, False)
        weights = shared_out(routing.weights, kept, renormalise=self.inner.renormalise)
        ids = jnp.where(kept, routing.ids, experts)
        return dataclasses.replace(routing, ids=ids, weights=weights)
