"""The loss of a language model over a batch: next tokens, and the balance of its routers."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..errors import RequestError
from ..model import CausalLM
from ..model.balance import layer_load_balancing_losses, load_balancing_loss, router_z_loss
from .batch import Batch

# Logits in memory at once, in numbers: 1 GiB in float32. More tokens are worked through in turn.
LOGITS_AT_ONCE = 2**28


Parts = dict[str, Float[Array, ""]]


class Objective(Protocol):
    """What a step makes smaller. It is hashable, and equal ones share a compiled program."""

    def size(self, batch: Any) -> Float[Array, ""]:
        """Float32 [], what the mean of a whole batch is over."""
        ...

    def loss(
        self, model: CausalLM, part: Any, size: Array, share: float
    ) -> tuple[Float[Array, ""], Parts]:
        """The loss of some of a batch's rows, and what it consists of, by name.

        Losses and parts are such that those of all rows of a batch add up to the batch's.

        Args:
            model: computes it.
            part: some rows.
            size: of the whole batch.
            share: of the rows in the batch.
        """
        ...


@dataclasses.dataclass(frozen=True)
class NextTokens:
    """The mean loss of a token, and penalties on the routers.

    Attributes:
        balance: weight of the pooled load-balancing loss (transformers' `router_aux_loss_coef`).
        layer_balance: weight of the mean over layers of each layer's own.
        router_z: weight of the router z-loss.

    Raises:
        RequestError: a weight below 0, or one that is not finite.
    """

    balance: float = 0.0
    layer_balance: float = 0.0
    router_z: float = 0.0

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if not 0 <= value < float("inf"):
                raise RequestError(f"{name} is {value}; accepted are weights from 0 on")

    def size(self, batch: Batch) -> Float[Array, ""]:
        """How many targets count."""
        return jnp.sum(batch.scored.astype(jnp.float32))

    def loss(
        self, model: CausalLM, part: Batch, size: Array, share: float
    ) -> tuple[Float[Array, ""], Parts]:
        """See `Objective`. The parts are `loss`, of tokens alone, and penalties by name."""
        start = jnp.zeros_like(part.lengths)
        output = model.forward(part.inputs, None, start, part.lengths)
        losses = token_log_losses(model, output.residual, part.targets)
        mean = jnp.sum(jnp.where(part.scored, losses, 0.0)) / size
        parts, total = {"loss": mean}, mean
        if not output.routing:
            self._refuse_dense()
            return total, parts
        places = jnp.arange(part.inputs.shape[1], dtype=jnp.int32)[None, :]
        valid = places < part.lengths[:, None]
        own = layer_load_balancing_losses(output.routing, valid)
        parts |= {
            "balance": share * load_balancing_loss(output.routing, valid),
            "layer_balance": share * sum(own.values(), jnp.float32(0)) / len(own),
            "router_z": share * router_z_loss(output.routing, valid),
        }
        for name, weight in dataclasses.asdict(self).items():
            if weight:
                total = total + weight * parts[name]
        return total, parts

    def _refuse_dense(self) -> None:
        given = [name for name, weight in dataclasses.asdict(self).items() if weight]
        if given:
            raise RequestError(
                f"no MoE layers: {', '.join(given)} {'are' if len(given) > 1 else 'is'} about "
                "routers; leave it out"
            )


def token_losses(logits: Float[Array, "... V"], targets: Int[Array, "..."]) -> Float[Array, "..."]:
    """Negative log-likelihood of each target in nats; softmax is taken here, in float32."""
    logits = logits.astype(jnp.float32)
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - chosen


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
