"""Log-probabilities of scored tokens over the whole vocabulary, some rows at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ..errors import RequestError
from ..model import CausalLM, FlatModel, check_model, whole
from .windows import Batch, Windows

DEFAULT_BATCH_SIZE = 4
ROWS = 256
"""Scored tokens whose log-probabilities are held at a time: 254 MB with a vocabulary of 248,320."""


@dataclasses.dataclass(frozen=True)
class Scores:
    """What a model says of R scored tokens, R at most `ROWS`.

    Attributes:
        log_probabilities: float32 [ROWS, V], natural logarithms; rows from R on mean nothing.
        targets: int32 [R], the tokens.
        numbers: int32 [R], the window of each.
        describe: a window's number to words.
    """

    log_probabilities: Array
    targets: np.ndarray
    numbers: np.ndarray
    describe: Callable[[int], str]

    def finite(self, values: Array, what: str) -> np.ndarray:
        """The values of the R tokens on the host.

        Args:
            values: [ROWS], computed from the log-probabilities.
            what: whose they are, for the message.

        Returns:
            float64 [R].

        Raises:
            FloatingPointError: one is NaN or infinite.
        """
        host = np.asarray(values, np.float64)[: len(self.targets)]
        wrong = ~np.isfinite(host)
        if wrong.any():
            window = self.describe(int(self.numbers[np.argmax(wrong)]))
            raise FloatingPointError(
                f"{what}: NaN or infinite logits in {window}; check the weights (qwen-jax convert "
                "FOLDER --verify) or use dtype float32"
            )
        return host


def score(
    model: CausalLM, windows: Windows, *, batch_size: int = DEFAULT_BATCH_SIZE
) -> Iterator[Scores]:
    """Run a model over windows; one batch of them and `ROWS` rows of logits are held at a time.

    Args:
        model: the model.
        windows: what to run over.
        batch_size: windows in one forward pass.

    Raises:
        RequestError: windows longer than the model's context, or a batch size below 1.
    """
    check_model(model)
    limit = model.config.max_position_embeddings
    if windows.window > limit:
        raise RequestError(
            f"window is {windows.window}, but the model's context is {limit} tokens; give a "
            "smaller window"
        )
    return _score(FlatModel.of(model), windows, batch_size)


def _score(model: FlatModel, windows: Windows, batch_size: int) -> Iterator[Scores]:
    for batch in windows.batches(batch_size):
        yield from score_batch(model, batch, windows.describe)


def score_batch(model: FlatModel, batch: Batch, describe: Callable[[int], str]) -> Iterator[Scores]:
    """Run a model over one batch; see `score`.

    Args:
        model: the model.
        batch: what to run over.
        describe: a window's number to words, for messages.
    """
    hidden = _hidden(model, batch.tokens, batch.lengths)
    for rows in row_slices(batch):
        log_probabilities = _log_probabilities(model, hidden, padded(batch.positions[rows]))
        yield Scores(log_probabilities, batch.targets[rows], batch.numbers[rows], describe)


def row_slices(batch: Batch) -> list[slice]:
    """The scored tokens of a batch, `ROWS` at a time."""
    return [slice(begin, begin + ROWS) for begin in range(0, len(batch.targets), ROWS)]


def padded(rows: np.ndarray) -> np.ndarray:
    """Filled up with zeros to `ROWS` rows, so that one compiled program serves."""
    return np.pad(rows, [(0, ROWS - len(rows)), *[(0, 0)] * (rows.ndim - 1)])


@jax.jit
def target_log_probabilities(
    log_probabilities: Float[Array, "R V"], targets: Int[Array, " R"] | np.ndarray
) -> Float[Array, " R"]:
    """The log-probability of each row's target; NaN where any logit of the row was NaN."""
    return jnp.take_along_axis(log_probabilities, targets[:, None], axis=-1)[:, 0]


@jax.jit
def _hidden(
    model: FlatModel, tokens: Int[Array, "B T"], lengths: Int[Array, " B"]
) -> Float[Array, "B T D"]:
    return whole(model).forward(tokens, None, jnp.zeros_like(lengths), lengths).hidden_states[-1]


@jax.jit
def _log_probabilities(
    model: FlatModel, hidden: Float[Array, "B T D"], positions: Int[Array, " R"]
) -> Float[Array, "R V"]:
    rows = hidden.reshape(-1, hidden.shape[-1])[positions]
    return jax.nn.log_softmax(whole(model).logits(rows), axis=-1)
