"""Expert dropout: in each step some experts of each layer are not there for any token.

What is left must do without them, so that no few experts become indispensable.
"""

from __future__ import annotations

import jax
from flax import nnx
from jaxtyping import Array, Bool, Float

from pallas_kernels.router import router

from ..errors import RequestError
from ..model import CausalLM, RouterContext, Routing
from ..model.routing import TopKRouter
from .experts import sparse_feeds


def kept_experts(key: Array, experts: int, slots: int, rate: float) -> Bool[Array, " E"]:
    """Which experts stay: each with probability 1 - rate, and at least as many as a token uses."""
    draws = jax.random.uniform(key, (experts,))
    enough = jax.lax.top_k(draws, slots)[0][-1]
    return (draws >= rate) | (draws >= enough)


class DroppingRouter(nnx.Module):
    """The released rule among those experts that stay; its logits are those of all."""

    def __init__(self, inner: TopKRouter, kept: Bool[Array, " E"]):
        self.inner = inner
        self.kept = nnx.Variable(kept)

    def __call__(self, x: Float[Array, "B T D"], context: RouterContext) -> Routing:
        batch, tokens, width = x.shape
        flat = router(
            x.reshape(-1, width),
            self.inner.weight[...],
            mask=self.kept[...][None, :],
            valid=context.valid.reshape(-1),
            slots=self.inner.chosen,
            renormalise=self.inner.renormalise,
            implementation=self.inner.implementation,
        )
        ids, weights, logits = (array.reshape(batch, tokens, -1) for array in flat)
        return Routing(ids, weights, logits)


def drop_experts(model: CausalLM, key: Array, rate: float) -> None:
    """Puts a `DroppingRouter` in each sparse layer, with a draw of its own.

    Raises:
        RequestError: a rate outside 0 to 1, a dense model, or a router that is not the released
            one, which this cannot mask.
    """
    if not 0 <= rate < 1:
        raise RequestError(f"expert dropout is {rate}; accepted is 0 up to, but not, 1")
    for number, moe in enumerate(sparse_feeds(model, "expert dropout")):
        if type(moe.gate) is not TopKRouter:
            raise RequestError(
                f"expert dropout masks the released router, not a {type(moe.gate).__name__}; set "
                "it to 0, or mask experts in the router itself"
            )
        experts = moe.gate.weight.shape[0]
        kept = kept_experts(jax.random.fold_in(key, number), experts, moe.gate.chosen, rate)
        moe.gate = DroppingRouter(moe.gate, kept)
