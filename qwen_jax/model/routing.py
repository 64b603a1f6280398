"""What a router is, what it sees and what it answers.

Statistics and further routers live in `qwen_jax.research`.
"""

import dataclasses
from typing import Literal, Protocol

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.router import router

from ..pytree import pytree
from .layers import parameter

Capture = Literal["none", "ids", "full"]
"""What a forward pass returns of the routing: nothing, ids and weights, or the logits too."""


@pytree
class Routing:
    """The choice of one MoE layer.

    Attributes:
        ids: int32 [B, T, A], experts in order of falling weight. At padding, and in slots that a
            router leaves empty, the id is E (one past the last expert), so that scatters with
            `mode="drop"` and one-hot codes skip it.
        weights: float32 [B, T, A], weight of each expert's output; 0 in empty slots.
        logits: float32 [B, T, E] before any softmax, or None where not captured.
    """

    ids: Array
    weights: Array
    logits: Array | None = None

    def captured(self, capture: Capture) -> "Routing":
        """This routing with no more than `capture` asks for."""
        return self if capture == "full" else dataclasses.replace(self, logits=None)


@pytree
class RouterContext:
    """What a router may look at beside the tokens themselves.

    Attributes:
        valid: bool [B, T], False at padding. Padding takes no expert, whatever the router says.
        mixed: [B, T, D], this layer's mixer output, before the residual add.
    """

    valid: Array
    mixed: Array


class Router(Protocol):
    """Anything that chooses experts: `router(x, context) -> Routing`, pure and jittable.

    x is the float32 [B, T, D] input of the MoE block, after its norm.
    """

    def __call__(self, x: Float[Array, "B T D"], context: RouterContext) -> Routing: ...


class TopKRouter(nnx.Module):
    """Softmax over all experts in float32, the k largest, renormalised if the model does so.

    Equal scores go to the lower id. Slots of padding are empty.
    """

    def __init__(
        self,
        width: int,
        experts: int,
        chosen: int,
        dtype: str,
        *,
        renormalise: bool,
        implementation: str | None,
    ):
        self.weight = parameter((experts, width), dtype)
        self.chosen = chosen
        self.renormalise = renormalise
        self.implementation = implementation

    def __call__(self, x: Float[Array, "B T D"], context: RouterContext) -> Routing:
        batch, tokens, width = x.shape
        flat = router(
            x.reshape(-1, width),
            self.weight[...],
            valid=context.valid.reshape(-1),
            slots=self.chosen,
            renormalise=self.renormalise,
            implementation=self.implementation,
        )
        ids, weights, logits = (array.reshape(batch, tokens, -1) for array in flat)
        return Routing(ids, weights, logits)


def without_padding(routing: Routing, valid: Bool[Array, "B T"], experts: int) -> Routing:
    """The routing with id E and weight 0 in empty slots, those of padding included."""
    used = valid[..., None] & (routing.ids >= 0) & (routing.ids < experts)
    ids: Int[Array, "B T A"] = jnp.where(used, routing.ids, experts)
    weights = jnp.where(used, routing.weights, 0.0)
    return dataclasses.replace(routing, ids=ids, weights=weights)
