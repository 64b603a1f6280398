"""The loss of a language model over a batch: next tokens, and the balance of its routers."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..errors import RequestError
from ..model import CausalLM
from ..model.balance import layer_load_balancing_losses, load_balancing_loss, router_z_loss
from .batch import Batch

# Logits in memory at once, in numbers: 1 GiB in float32. More tokens are worked through in turn.
LOGITS_AT_ONCE = 2**28


@dataclasses.dataclass(frozen=True)
class Penalties:
    """Weights of what is added to the mean loss of a token.

    Attributes:
        balance: of the pooled load-balancing loss (transformers' `router_aux_loss_coef`).
        layer_balance: of the mean over layers of each layer's own.
        router_z: of the router z-loss.

    Raises:
        RequestError: a weight below 0, or none that is finite.
    """

    balance: float = 0.0
    layer_balance: float = 0.0
    router_z: float = 0.0

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if not 0 <= value < float("inf"):
                raise RequestError(f"{name} is {value}; accepted are weights from 0 on")


def token_losses(logits: Float[Array, "... V"], targets: Int[Array, "..."]) -> Float[Array, "..."]:
    """Negative log-likelihood of each target in nats; softmax is taken here, in float32."""
    logits = logits.astype(jnp.float32)
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - chosen


def summed_loss(
    model: CausalLM,
    residual: Float[Array, "B T D"],
    targets: Int[Array, "B T"],
    scored: Bool[Array, "B T"],
) -> Float[Array, ""]:
    """The sum of the losses of the targets that count, in slices of tokens if logits are many."""
    losses = token_log_losses(model, residual, targets)
    return jnp.sum(jnp.where(scored, losses, 0.0))


def token_log_losses(
    model: CausalLM, residual: Float[Array, "B T D"], targets: Int[Array, "B T"]
) -> Float[Array, "B T"]:
    """The loss of each target, given the residual stream behind the last layer."""
    tokens, vocabulary = targets.size, model.config.vocab_size

    def losses(inputs: tuple[Array, Array]) -> Array:
        return token_losses(model.next_logits(inputs[0]), inputs[1])

    if tokens * vocabulary <= LOGITS_AT_ONCE:
        return losses((residual, targets))
    flat = residual.reshape(tokens, -1), targets.reshape(tokens)
    size = max(1, LOGITS_AT_ONCE // vocabulary)
    found = jax.lax.map(jax.checkpoint(lambda one: losses(one)), flat, batch_size=size)
    return found.reshape(targets.shape)


def loss_of_batch(
    model: CausalLM, batch: Batch, penalties: Penalties, tokens: Array, share: float
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """The loss of a part of a batch, and what it consists of.

    Args:
        model: computes it.
        batch: the part.
        penalties: weights of what is added.
        tokens: float32 [], targets that count in the whole batch.
        share: of the part in the batch, for means that are not over tokens.

    Returns:
        The loss, such that those of all parts add up to the batch's; and by name `loss` (of
        tokens alone) and the penalties without their weights, which add up likewise.
    """
    start = jnp.zeros_like(batch.lengths)
    output = model.forward(batch.inputs, None, start, batch.lengths)
    losses = summed_loss(model, output.residual, batch.targets, batch.scored) / tokens
    parts, total = {"loss": losses}, losses
    if output.routing:
        places = jnp.arange(batch.inputs.shape[1], dtype=jnp.int32)[None, :]
        valid = places < batch.lengths[:, None]
        own = layer_load_balancing_losses(output.routing, valid)
        parts |= {
            "balance": share * load_balancing_loss(output.routing, valid),
            "layer_balance": share * sum(own.values(), jnp.float32(0)) / len(own),
            "router_z": share * router_z_loss(output.routing, valid),
        }
        for name, weight in dataclasses.asdict(penalties).items():
            if weight:
                total = total + weight * parts[name]
    return total, parts
