"""Two stages: a light filter leaves few candidates, which are scored in the light of the mixer."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from ...errors import RequestError
from ...model import RouterContext, Routing
from .choice import changed, largest, products, softmax_of, sorted_routing

EXCLUDED = -1e30
"""The logit of experts that are no candidates: no probability, and finite for statistics."""


class TwoStageRouter(nnx.Module):
    """A small MLP takes the token to 8 candidates, a score with the mixer's output to 2.

        candidates = the largest of W_out silu(W_in x)
        score[e]   = (W_q [x, mixed]) . key[e] / sqrt(r), of candidates
        weights    = softmax over the k chosen

    An intervention's bias and temperature count in both stages; a forced expert passes the filter,
    and a token can be given as many experts as there are candidates.

    Attributes:
        filter_in: W_in [h, D].
        filter_out: W_out [E, h].
        query: W_q [r, 2D].
        keys: [E, r].

    Raises:
        RequestError: not 1 <= k <= candidates <= E.
    """

    intervenes = True

    def __init__(
        self,
        key: Array,
        width: int,
        experts: int,
        *,
        candidates: int = 8,
        k: int = 2,
        hidden: int = 32,
        rank: int = 32,
    ):
        if not 1 <= k <= candidates <= experts:
            raise RequestError(
                f"k is {k} and candidates {candidates}; accepted is k <= candidates <= {experts}, "
                "the experts"
            )
        own = jax.random.split(key, 4)
        self.filter_in = _matrix(own[0], (hidden, width))
        self.filter_out = _matrix(own[1], (experts, hidden))
        self.query = _matrix(own[2], (rank, 2 * width))
        self.keys = _matrix(own[3], (experts, rank))
        self.candidates = candidates
        self.k = k

    def __call__(self, x: Float[Array, "B T D"], context: RouterContext) -> Routing:
        """See the class."""
        coarse = products(jax.nn.silu(products(x, self.filter_in[...])), self.filter_out[...])
        passed = largest(changed(coarse, context), self._of_filter(context), self.candidates)
        numbers = jnp.arange(coarse.shape[-1], dtype=jnp.int32)[None, None, None, :]
        candidate = jnp.any(passed[..., None] == numbers, axis=-2)
        both = jnp.concatenate([x, context.mixed.astype(x.dtype)], axis=-1)
        query = products(both, self.query[...])
        fine = products(query, self.keys[...]) * self.keys[...].shape[1] ** -0.5
        logits = jnp.where(candidate, fine, EXCLUDED)
        scores = jnp.where(candidate, changed(fine, context), -jnp.inf)
        ids = largest(scores, context, self.k, bound=self.candidates)
        return sorted_routing(ids, softmax_of(scores, ids, renormalise=True), logits)

    def _of_filter(self, context: RouterContext) -> RouterContext:
        """The filter leaves as many as ever, whatever number of experts a token takes."""
        change = context.intervention
        if change is None:
            return context
        limit = jnp.zeros_like(change.limit)
        change = dataclasses.replace(change, limit=limit, slots=self.candidates)
        return dataclasses.replace(context, intervention=change)


def _matrix(key: Array, shape: tuple[int, int]) -> nnx.Param:
    scale = jnp.float32(shape[1] ** -0.5)
    return nnx.Param(scale * jax.random.normal(key, shape, jnp.float32))
