"""How often each expert of each layer was chosen, added up on the device."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..config import QwenConfig
from ..decode import StepOutput
from ..errors import RequestError
from ..model import Capture, Routing
from ..model.intervention import sparse_layers
from ..model.trace import stacked
from ..pytree import pytree

# What a step of a loop has: 128 rows of 8 experts.
_FEW_SLOTS = 1024


@pytree
class RoutingCounts:
    """Sums over tokens for each expert of each MoE layer. Empty slots and padding do not count.

    An observer of decode loops: `init_state(..., observer=RoutingCounts.zeros(config))`, and after
    the loop `state.observer`. What it adds to a step is a few launches for all layers together, and
    its size does not depend on how many tokens there are. Sums of weights and probabilities are
    float32: of a million tokens, added one at a time, they are exact to about 1e-4 of themselves.

    Attributes:
        chosen: int32 [L, E], how often each expert was chosen.
        weight: float32 [L, E], sum of the weights that it was given.
        probability: float32 [L, E], sum of its softmax probability over all experts, chosen or not;
            None unless the logits are captured.
        tokens: int32 [].
        layers: numbers of the MoE layers in the model, rising (static).
    """

    chosen: Array
    weight: Array
    probability: Array | None
    tokens: Array
    layers: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    @classmethod
    def zeros(cls, config: QwenConfig, capture: Capture = "ids") -> RoutingCounts:
        """No token yet.

        Args:
            config: the model's.
            capture: "full" to sum probabilities too, which reads the router's logits.

        Raises:
            RequestError: the model has no MoE layers, or capture is "none".
        """
        if capture not in ("ids", "full"):
            raise RequestError(f'capture is {capture!r}; accepted are "ids" and "full"')
        layers = sparse_layers(config)
        shape = (len(layers), config.num_experts)
        # Arrays of their own: two fields cannot donate one.
        probability = jnp.zeros(shape, jnp.float32) if capture == "full" else None
        chosen, weight = jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)
        return cls(chosen, weight, probability, jnp.int32(0), layers)

    @property
    def capture(self) -> Capture:
        """How much of the routing `observe` reads."""
        return "ids" if self.probability is None else "full"

    def observe(self, output: StepOutput, taken: Bool[Array, " B"]) -> RoutingCounts:
        """One more step of a loop, of whose rows those in `taken` count.

        Raises:
            RequestError: several tokens a row, of which `taken` does not tell which are padding.
        """
        tokens = {choice.ids.shape[1] for choice in output.routing.values()}
        if tokens - {1}:
            raise RequestError(
                f"a step has one token a row, this output {sorted(tokens)}; count a prompt with "
                "counts.add(output.routing, valid)"
            )
        return self.add(output.routing, taken[:, None])

    def add(self, routing: Mapping[int, Routing], valid: Bool[Array, "B T"]) -> RoutingCounts:
        """The sums with further tokens; pure.

        Args:
            routing: of a forward pass.
            valid: tokens that count.

        Raises:
            RequestError: routing of other layers, or without the logits that the sums need.
        """
        if tuple(sorted(routing)) != self.layers:
            raise RequestError(
                f"routing is of layers {sorted(routing)}; these counts are of {list(self.layers)}. "
                "Make them by RoutingCounts.zeros(model.config)"
            )
        layers, experts = self.chosen.shape
        choice = stacked(routing, experts)
        ids = jnp.where(valid[None, :, :, None], choice.ids, experts).reshape(layers, -1)
        chosen, weight = _sums(ids, choice.weights.reshape(layers, -1), experts)
        return dataclasses.replace(
            self,
            chosen=self.chosen + chosen,
            weight=self.weight + weight,
            probability=self._more_probable(choice.logits, valid),
            tokens=self.tokens + jnp.sum(valid, dtype=jnp.int32),
        )

    def _more_probable(self, logits: Array | None, valid: Array) -> Array | None:
        if self.probability is None:
            return None
        if logits is None:
            raise RequestError('routing has no logits; run the model with capture "full"')
        probability = jnp.where(valid[None, :, :, None], jax.nn.softmax(logits, axis=-1), 0.0)
        return self.probability + jnp.sum(probability, axis=(1, 2))


def _sums(
    ids: Int[Array, "L S"], weights: Float[Array, "L S"], experts: int
) -> tuple[Int[Array, "L E"], Float[Array, "L E"]]:
    """Of S slots of each layer: how often each expert stands there, and its weights summed."""
    if ids.shape[1] > _FEW_SLOTS:
        layer = jnp.arange(ids.shape[0], dtype=jnp.int32)[:, None]
        zeros = jnp.zeros((ids.shape[0], experts), jnp.float32)
        chosen = zeros.astype(jnp.int32).at[layer, ids].add(1, mode="drop")
        return chosen, zeros.at[layer, ids].add(weights, mode="drop")
    # One launch on a GPU; but XLA for CPUs would write the codes of many slots to memory.
    hits = ids[:, :, None] == jnp.arange(experts, dtype=jnp.int32)[None, None, :]
    chosen = jnp.sum(hits, axis=1, dtype=jnp.int32)
    return chosen, jnp.sum(jnp.where(hits, weights[:, :, None], 0.0), axis=1)
