"""The routing of all MoE layers together."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ..errors import RequestError
from ..pytree import pytree
from .routing import Routing


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
