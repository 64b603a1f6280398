"""Experts choose tokens (Zhou et al. 2022, arXiv 2202.09368)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from ...model import RouterContext, Routing
from .choice import changed, checked_k, products, sorted_routing


class ExpertChoiceRouter(nnx.Module):
    """Each expert takes the tokens of a sequence that want it most, the same number for all.

    An expert takes ceil(tokens * k / E) of a sequence's real tokens, by their softmax over experts;
    of equal ones the earlier. A token may have no expert, or all. The weight is the softmax's. The
    choice depends on later tokens of the sequence: it is for training and for measuring whole
    texts, not for decoding, where each expert would take the only token.

    Raises:
        RequestError: k outside 1 to E.
    """

    intervenes = True

    def __init__(self, weight: Float[Array, "E D"], k: int):
        self.weight = nnx.Param(weight)
        self.k = checked_k(k, weight.shape[0])

    def __call__(self, x: Float[Array, "B T D"], context: RouterContext) -> Routing:
        """See the class."""
        logits = products(x, self.weight[...])
        experts, valid = logits.shape[-1], context.valid
        p = jax.nn.softmax(changed(logits, context), axis=-1)
        wanted = jnp.where(valid[..., None], p, -1.0)
        # The place of each token in an expert's order; a stable sort, so earlier tokens first.
        order = jnp.argsort(-jax.lax.stop_gradient(wanted), axis=1)
        place = jnp.argsort(order, axis=1)
        count = jnp.sum(valid.astype(jnp.int32), axis=1)
        most = (count * self.k + experts - 1) // experts
        chosen = (place < most[:, None, None]) & valid[..., None]
        rank = jnp.where(chosen, p, -1.0)
        if (change := context.intervention) is not None:
            rank = jnp.where(change.banned, -1.0, rank)
            rank = jnp.where(change.forced & valid[..., None], 2.0 + p, rank)
        best, ids = jax.lax.top_k(jax.lax.stop_gradient(rank), experts)
        filled = best >= 0
        if change is not None:
            slot = jnp.arange(experts, dtype=jnp.int32)[None, None, :]
            filled &= slot < change.most(experts)[..., None]
        weights = jnp.where(filled, jnp.take_along_axis(p, ids, axis=-1), 0.0)
        return sorted_routing(jnp.where(filled, ids, experts), weights, logits)
