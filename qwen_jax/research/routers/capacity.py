"""Experts that take no more than so many tokens of a forward pass."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from ...errors import RequestError
from ...model import RouterContext, Routing
from ...model.routing import TopKRouter
from ...whole_number import check_whole
from .choice import changed, largest, shared_out, softmax_of, sorted_routing

Overflow = Literal["drop", "renormalise", "next"]


class CapacityRouter(nnx.Module):
    """An inner router whose experts are full after `capacity` tokens.

    Tokens are served in order, row by row, and each token's experts in order of their weights, so
    that no token's experts depend on later ones of its sequence. Padding takes no capacity. What
    counts is one call: one chunk of a prompt, one decode step. What does not fit ("overflow"):

    - "drop": the slot stays empty, and the token goes without that part (Switch, GShard);
    - "renormalise": the token's other experts take over the weight;
    - "next": the token takes its best experts among those with room.

    With a capacity of as many tokens as there are nothing changes, bit by bit. Forced experts that
    are full drop tokens too.

    Attributes:
        capacity: tokens an expert.

    Raises:
        RequestError: a capacity below 1, or an unknown overflow.
    """

    intervenes = True

    def __init__(self, inner: TopKRouter, capacity: int, *, overflow: Overflow = "drop"):
        check_whole("capacity", capacity, 1)
        if overflow not in ("drop", "renormalise", "next"):
            raise RequestError(
                f"overflow is {overflow!r}; accepted are 'drop', 'renormalise' and 'next'"
            )
        self.inner = inner
        self.capacity = capacity
        self.overflow = overflow

    def __call__(self, x: Float[Array, "B T D"], context: RouterContext) -> Routing:
        """See the class."""
        routing = self.inner(x, context)
        assert routing.logits is not None
        experts = routing.logits.shape[-1]
        if self.overflow == "next":
            return self._elsewhere(routing, context)
        kept = fitting(routing.ids, experts, self.capacity)
        renormalise = self.overflow == "renormalise"
        weights = shared_out(routing.weights, kept, renormalise=renormalise)
        return dataclasses.replace(
            routing, ids=jnp.where(kept, routing.ids, experts), weights=weights
        )

    def _elsewhere(self, routing: Routing, context: RouterContext) -> Routing:
        """Token by token, the best experts with room; what the inner router chose where it can."""
        assert routing.logits is not None
        scores = changed(routing.logits, context)
        batch, tokens, experts = scores.shape

        def serve(load: Int[Array, " E"], at: Int[Array, ""]) -> tuple[Array, Array]:
            change = context.intervention
            one = dataclasses.replace(
                context,
                valid=context.valid.reshape(-1)[at][None, None],
                intervention=None if change is None else change.token(at),
            )
            room = (load < self.capacity)[None, None]
            row = jnp.where(room, scores.reshape(-1, experts)[at][None, None], -jnp.inf)
            ids = largest(row, one, self.inner.chosen)[0, 0]
            return load.at[ids].add(1, mode="drop"), ids

        numbers = jnp.arange(batch * tokens, dtype=jnp.int32)
        _, ids = jax.lax.scan(serve, jnp.zeros((experts,), jnp.int32), numbers)
        ids = ids.reshape(batch, tokens, -1)
        weights = softmax_of(scores, ids, renormalise=self.inner.renormalise)
        other = sorted_routing(ids, weights, routing.logits)
        moved = jnp.any(other.ids != routing.ids, axis=-1, keepdims=True)
        return dataclasses.replace(
            routing,
            ids=jnp.where(moved, other.ids, routing.ids),
            weights=jnp.where(moved, other.weights, routing.weights),
        )


def fitting(ids: Int[Array, "B T A"], experts: int, capacity: int) -> Bool[Array, "B T A"]:
    """Which slots find room: those with fewer than `capacity` of the same expert before them.

    Args:
        ids: empty slots have an id of E or more, and take none.
        experts: E.
        capacity: slots an expert.
    """
    flat = ids.reshape(-1)
    mine = (flat[:, None] == jnp.arange(experts, dtype=jnp.int32)[None, :]).astype(jnp.int32)
    before = jnp.sum(mine * (jnp.cumsum(mine, axis=0) - mine), axis=-1)
    return (before < capacity).reshape(ids.shape)
