"""Sigmoid scores, balanced by a bias of each expert that no loss sees.

The choice goes by score + bias, weights by the score alone. After each batch the bias of an expert
with more than its share falls, and of one with less it rises (Wang et al. 2024, arXiv 2408.15664;
the router of DeepSeek-V3).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Real

from ...model import RouterContext, Routing
from ...model.layer_intervention import at_slots
from .choice import changed, checked_k, largest, products, sorted_routing


class SigmoidRouter(nnx.Module):
    """The k largest of sigmoid(logit) + balance; weights are the sigmoids.

    Attributes:
        weight: [E, D].
        balance: float32 [E]; `balanced` says how it changes. No gradient reaches it.

    Raises:
        RequestError: k outside 1 to E.
    """

    intervenes = True

    def __init__(self, weight: Float[Array, "E D"], k: int, *, renormalise: bool = True):
        self.weight = nnx.Param(weight)
        self.balance = nnx.Variable(jnp.zeros((weight.shape[0],), jnp.float32))
        self.k = checked_k(k, weight.shape[0])
        self.renormalise = renormalise

    def __call__(self, x: Float[Array, "B T D"], context: RouterContext) -> Routing:
        """See the class."""
        logits = products(x, self.weight[...])
        scores = jax.nn.sigmoid(changed(logits, context))
        balance = jnp.broadcast_to(jax.lax.stop_gradient(self.balance[...]), scores.shape)
        ids = largest(scores + balance, context, self.k)
        weights = at_slots(scores, ids, 0.0)
        if self.renormalise:
            total = jnp.sum(weights, axis=-1, keepdims=True)
            weights = weights / jnp.where(total > 0, total, 1.0)
        return sorted_routing(ids, weights, logits)


def balanced(
    balance: Float[Array, " E"], counts: Real[Array, " E"], rate: float = 1e-3
) -> Float[Array, " E"]:
    """The bias after a batch: `rate` down for experts above the mean load, up for those below.

    Args:
        balance: float32.
        counts: slots that each expert took in the batch, padding left out.
        rate: size of a step.
    """
    load = counts.astype(jnp.float32)
    return balance + rate * jnp.sign(jnp.mean(load) - load)
