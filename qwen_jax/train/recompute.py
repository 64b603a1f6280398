"""Gradient checkpointing: a layer's inside is computed again when its gradient is wanted.

Chen et al., "Training Deep Nets with Sublinear Memory Cost" (arXiv 1604.06174). The forward pass
keeps the input of each layer alone; the price is one more forward pass.
"""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from ..model import CausalLM


class Recomputed(nnx.Module):
    """A layer that keeps nothing but its arguments for the backward pass."""

    def __init__(self, layer: nnx.Module):
        self.layer = layer

    def __call__(self, *args: Any) -> Any:
        graph, state = nnx.split(self.layer)

        def run(state: Any, *args: Any) -> Any:
            return nnx.merge(graph, state)(*args)

        return jax.checkpoint(run)(state, *args)


def recompute_layers(model: CausalLM) -> None:
    """Wraps every decoder layer of a model."""
    layers: Any = nnx.List([Recomputed(layer) for layer in model.layers])
    model.layers = layers
