"""How evenly routers spread tokens, as losses: for training, and to judge a model.

Load balancing: Fedus et al., "Switch Transformers" (arXiv 2101.03961), as transformers has it for
top-k; z-loss: Zoph et al., "ST-MoE" (arXiv 2202.08906). Every function takes the routing of a
forward pass with capture "full", whose logits are raw: softmax is taken here, once.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from ..errors import RequestError
from ..pytree import pytree
from .routing import Routing


@pytree
class Load:
    """What one layer's router did over the real tokens.

    Attributes:
        chosen: float32 [E], how often each expert was chosen.
        probability: float32 [E], the sum of each expert's softmax probability.
        tokens: float32 [], how many tokens there were.
    """

    chosen: Float[Array, " E"]
    probability: Float[Array, " E"]
    tokens: Float[Array, ""]

    @classmethod
    def of(cls, routing: Routing, valid: Bool[Array, "B T"] | None = None) -> "Load":
        """The load of a layer; see `load_balancing_loss` for arguments and errors."""
        logits = _logits(routing)
        experts, real = logits.shape[-1], _real(routing, valid)
        # Ids of empty slots are E, whose code is all zeros.
        codes = jax.nn.one_hot(routing.ids, experts, dtype=jnp.float32)
        chosen = jnp.einsum("btae,bt->e", codes, real)
        probability = jnp.einsum("bte,bt->e", jax.nn.softmax(logits, axis=-1), real)
        return cls(chosen, probability, jnp.sum(real))

    def loss(self) -> Float[Array, ""]:
        """E times the product of share and mean probability, summed over experts; k if even."""
        tokens = jnp.maximum(self.tokens, 1.0)
        products = (self.chosen / tokens) * (self.probability / tokens)
        return self.chosen.shape[0] * jnp.sum(products)


def load_balancing_loss(
    routing: Mapping[int, Routing], valid: Bool[Array, "B T"] | None = None
) -> Float[Array, ""]:
    """The pooled loss: all layers' tokens counted together, as `load_balancing_loss_func` does.

    Equal to transformers' for its router (top-k of the softmax); about k, the experts a token, if
    tokens spread evenly.

    Args:
        routing: layer number -> routing with logits.
        valid: False at padding; all tokens count if None.

    Raises:
        RequestError: no MoE layer, routing without logits, or layers with other numbers of experts.
    """
    loads = list(_loads(routing, valid).values())
    numbers = sorted({load.chosen.shape[0] for load in loads})
    if len(numbers) > 1:
        raise RequestError(
            f"layers have {numbers} experts; the pooled load-balancing loss needs one number: take "
            "layer_load_balancing_losses"
        )
    return jax.tree.map(lambda *parts: sum(parts[1:], parts[0]), *loads).loss()


def layer_load_balancing_losses(
    routing: Mapping[int, Routing], valid: Bool[Array, "B T"] | None = None
) -> dict[int, Float[Array, ""]]:
    """The loss of each layer for itself, by layer number. Arguments as `load_balancing_loss`."""
    return {layer: load.loss() for layer, load in _loads(routing, valid).items()}


def router_z_loss(
    routing: Mapping[int, Routing], valid: Bool[Array, "B T"] | None = None
) -> Float[Array, ""]:
    """Mean square of the logarithm of the softmax's denominator: keeps router logits small.

    The mean is over real tokens and layers. Arguments as `load_balancing_loss`.
    """
    total, count = jnp.float32(0), jnp.float32(0)
    for choice in _sparse(routing).values():
        real = _real(choice, valid)
        size = jax.nn.logsumexp(_logits(choice), axis=-1)
        total, count = total + jnp.sum(size * size * real), count + jnp.sum(real)
    return total / jnp.maximum(count, 1.0)


def _loads(routing: Mapping[int, Routing], valid: Bool[Array, "B T"] | None) -> dict[int, Load]:
    return {layer: Load.of(choice, valid) for layer, choice in _sparse(routing).items()}


def _sparse(routing: Mapping[int, Routing]) -> Mapping[int, Routing]:
    if not routing:
        raise RequestError(
            'no MoE layers: a dense model has no routing, and capture "none" hides it'
        )
    return routing


def _logits(routing: Routing) -> Float[Array, "B T E"]:
    if routing.logits is None:
        raise RequestError("routing without logits; run the model with capture='full'")
    return routing.logits.astype(jnp.float32)


def _real(routing: Routing, valid: Bool[Array, "B T"] | None) -> Float[Array, "B T"]:
    """1 at real tokens and 0 at padding."""
    shape = routing.ids.shape[:2]
    if valid is None:
        return jnp.ones(shape, jnp.float32)
    if valid.shape != shape:
        raise RequestError(f"valid has shape {valid.shape}; the routing is of {shape} tokens")
    return valid.astype(jnp.float32)
