"""What a router is, what it sees and what it answers.

Statistics and further routers live in `qwen_jax.research`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, Protocol

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.router import router

from ..errors import RequestError
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


def stacked(routing: Mapping[int, Routing], experts: int) -> Routing:
    """The routing of all MoE layers as one, by rising layer number: ids [L, B, T, A], and so on.

    Layers with fewer slots than others get empty ones; logits are kept where all layers have them.

    Args:
        routing: layer number -> routing, as a forward pass returns it.
        experts: E, the id of empty slots.

    Raises:
        RequestError: there is no layer.
    """
    if not routing:
        raise RequestError(
            "no MoE layers: the model is dense, or its routing was not captured; give a model with "
            'experts, and capture "ids" or "full"'
        )
    choices = [routing[layer] for layer in sorted(routing)]
    slots = max(choice.ids.shape[-1] for choice in choices)

    def padded(array: Array, empty: int) -> Array:
        missing = slots - array.shape[-1]
        widths = [(0, 0)] * (array.ndim - 1) + [(0, missing)]
        return jnp.pad(array, widths, constant_values=empty) if missing else array

    ids = jnp.stack([padded(choice.ids, experts) for choice in choices])
    weights = jnp.stack([padded(choice.weights, 0) for choice in choices])
    logits = [choice.logits for choice in choices if choice.logits is not None]
    return Routing(ids, weights, jnp.stack(logits) if len(logits) == len(choices) else None)


@pytree
class RoutingTrace:
    """The choices of all MoE layers for N tokens, without padding.

    Its arrays are the host's, since N is not known beforehand; `qwen_jax.research.trace_of` makes
    it. `trace[layer]` is the `Routing` of one layer: ids [N, A], and so on.

    Attributes:
        ids: int32 [L, N, A], as in `Routing`; L counts the MoE layers alone.
        weights: float32 [L, N, A].
        logits: float32 [L, N, E] before any softmax, or None where not captured.
        tokens: int32 [N], the ids of the tokens.
        sequences: int32 [N], the number of the sequence that each token stood in.
        layers: numbers of the MoE layers in the model, rising (static).
        experts: E (static).
        fingerprint: of the model's configuration (static); see `research.trace.fingerprint`.
    """

    ids: np.ndarray
    weights: np.ndarray
    logits: np.ndarray | None
    tokens: np.ndarray
    sequences: np.ndarray
    layers: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    experts: int = dataclasses.field(metadata={"static": True})
    fingerprint: str = dataclasses.field(metadata={"static": True})

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def __getitem__(self, layer: int) -> Routing:
        if layer not in self.layers:
            raise RequestError(f"layer {layer} has no routing; accepted are {self.layers}")
        index = self.layers.index(layer)
        logits = None if self.logits is None else self.logits[index]
        of_host: Any = (self.ids[index], self.weights[index], logits)
        return Routing(*of_host)
