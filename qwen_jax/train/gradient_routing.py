"""Gradient routing: a small, capped signal to the experts that a token did not choose.

A router learns only from experts that it chooses, and these alone learn from the token: an expert
that is out of favour stays so. Here the outputs of the others are added with weight
min(strength * p, cap), p being the softmax probability, and taken away again behind a stop of the
gradient. So the forward pass stays as it is, bit for bit, while backwards those experts and their
logits see what they would see if they had that weight.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from ..errors import RequestError
from ..model import CausalLM, Routing
from .experts import DenseExperts, slot_weights, sparse_feeds


@dataclasses.dataclass(frozen=True)
class GradientRouting:
    """How strong the signal is.

    Attributes:
        strength: share of an expert's softmax probability that is its weight.
        cap: largest such weight.

    Raises:
        RequestError: a number outside its range.
    """

    strength: float = 0.1
    cap: float = 0.01

    def __post_init__(self) -> None:
        for name in ("strength", "cap"):
            if not 0 < (value := getattr(self, name)) <= 1:
                raise RequestError(f"{name} is {value}; accepted is a number above 0 up to 1")


class ListeningExperts(nnx.Module):
    """Experts that also listen to tokens which did not choose them."""

    def __init__(self, inner: DenseExperts, settings: GradientRouting):
        self.inner = inner
        self.settings = settings

    def __call__(self, x: Float[Array, "B T D"], routing: Routing) -> Float[Array, "B T D"]:
        hidden = self.inner.hidden(x)
        chosen = slot_weights(routing.ids, routing.weights, hidden.shape[2])
        signal = self.inner.mixed(hidden, self._faint(routing, hidden.shape[2]))
        return self.inner.mixed(hidden, chosen) + (signal - jax.lax.stop_gradient(signal))

    def _faint(self, routing: Routing, experts: int) -> Float[Array, "B T E"]:
        """Weights of the experts that were not chosen; 0 at padding and for those that were."""
        if routing.logits is None:
            raise RequestError("gradient routing needs a router that returns its logits")
        taken = slot_weights(routing.ids, jnp.ones_like(routing.weights), experts)
        real = jnp.any(routing.ids < experts, axis=-1, keepdims=True)
        share = self.settings.strength * jax.nn.softmax(routing.logits, axis=-1)
        free = (taken == 0) & jnp.broadcast_to(real, taken.shape)
        return jnp.where(free, jnp.minimum(share, self.settings.cap), 0.0)


def let_listen(model: CausalLM, settings: GradientRouting) -> None:
    """Puts `ListeningExperts` in each sparse layer. All experts are computed on every token.

    Raises:
        RequestError: a dense model, or experts in codes or of a kind that is not the model's own.
    """
    for moe in sparse_feeds(model, "gradient routing"):
        moe.experts = ListeningExperts(DenseExperts.instead_of(moe.experts), settings)
