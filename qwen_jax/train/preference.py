"""Direct preference optimisation: of two answers to a prompt, prefer the one that people chose.

Rafailov et al. (arXiv 2305.18290). The loss is -log sigmoid(beta * (margin of the model - margin of
the reference)), a margin being log p(chosen) - log p(rejected) given the prompt. The reference is
the model before training: its log probabilities are worked out once, before the first step.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..errors import RequestError
from ..model import CausalLM
from ..pytree import pytree
from ..whole_number import is_whole
from .batch import Batch
from .losses import Parts, token_log_losses


@pytree
class Pairs:
    """Preferences of one step.

    Attributes:
        chosen: B rows, whose answers alone are scored.
        rejected: B rows likewise.
        margin: float32 [B], the reference's log p(chosen) - log p(rejected).
    """

    chosen: Batch
    rejected: Batch
    margin: Array


@dataclasses.dataclass(frozen=True)
class DirectPreference:
    """The objective.

    Attributes:
        beta: how dear it is to leave the reference; a larger one stays nearer.

    Raises:
        RequestError: not above 0, or not finite.
    """

    beta: float = 0.1

    def __post_init__(self) -> None:
        if not 0 < self.beta < math.inf:
            raise RequestError(f"beta is {self.beta}; accepted is a number above 0")

    def size(self, batch: Pairs) -> Float[Array, ""]:
        """How many pairs there are."""
        return jnp.float32(batch.margin.shape[0])

    def loss(
        self, model: CausalLM, part: Pairs, size: Array, share: float
    ) -> tuple[Float[Array, ""], Parts]:
        """See `Objective`.

        The parts are `loss`, `accuracy` (share of pairs whose margin grew) and `margin` (the mean
        growth in nats).
        """
        growth = margins(model, part.chosen, part.rejected) - part.margin
        loss = jnp.sum(jax.nn.softplus(-self.beta * growth)) / size
        right = jnp.sum((growth > 0).astype(jnp.float32)) / size
        return loss, {"loss": loss, "accuracy": right, "margin": jnp.sum(growth) / size}


@dataclasses.dataclass(frozen=True)
class Preference:
    """A prompt and two answers to it, as token ids."""

    prompt: Sequence[int]
    chosen: Sequence[int]
    rejected: Sequence[int]


def rows_of(preferences: Sequence[Preference], window: int, vocab_size: int) -> tuple[Batch, Batch]:
    """The rows of `Pairs`, chosen and rejected.

    Args:
        preferences: B of them.
        window: inputs of a row; shorter ones are padded.
        vocab_size: V, the model's.

    Raises:
        RequestError: none, an empty prompt or answer, one that is too long, or what is no id from 0
            to V - 1: names the preference (from 0), its part and the place there.
    """
    if not preferences:
        raise RequestError("there are no preferences; give at least one")
    for number, preference in enumerate(preferences):
        _check_ids(number, preference, vocab_size)
    chosen = _rows([(p.prompt, p.chosen) for p in preferences], window)
    return chosen, _rows([(p.prompt, p.rejected) for p in preferences], window)


def _check_ids(number: int, preference: Preference, vocab_size: int) -> None:
    for part in ("prompt", "chosen", "rejected"):
        for place, value in enumerate(getattr(preference, part)):
            if not is_whole(value) or not 0 <= value < vocab_size:
                raise RequestError(
                    f"preference {number}, {part}, token {place} is {value!r}; accepted are ids "
                    f"from 0 to {vocab_size - 1}: encode it with the model's tokenizer"
                )


def _rows(both: Sequence[tuple[Sequence[int], Sequence[int]]], window: int) -> Batch:
    tokens = np.zeros((len(both), window + 1), np.int32)
    scored = np.zeros((len(both), window), bool)
    lengths = np.zeros(len(both), np.int32)
    for row, (prompt, answer) in enumerate(both):
        length = len(prompt) + len(answer)
        if not len(prompt) or not len(answer) or length > window + 1:
            raise RequestError(
                f"preference {row} has a prompt of {len(prompt)} and an answer of {len(answer)} "
                f"tokens; accepted is at least one of each, and {window + 1} in all"
            )
        tokens[row, :length] = [*prompt, *answer]
        scored[row, len(prompt) - 1 : length - 1] = True
        lengths[row] = length - 1
    arrays: tuple[Any, ...] = (tokens[:, :-1], tokens[:, 1:], lengths, scored)
    return Batch(*arrays)


def margins(model: CausalLM, chosen: Batch, rejected: Batch) -> Float[Array, " B"]:
    """The log probability of each chosen answer less that of its rejected one, in nats."""
    rows = jax.tree.map(lambda one, other: jnp.concatenate([one, other]), chosen, rejected)
    output = model.forward(rows.inputs, None, jnp.zeros_like(rows.lengths), rows.lengths)
    losses = token_log_losses(model, output.residual, rows.targets)
    answers = -jnp.sum(jnp.where(rows.scored, losses, 0.0), axis=-1)
    better, worse = jnp.split(answers, 2)
    return better - worse
