"""How likely continuations are after their contexts: what multiple choice is scored by."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ..decode.prompt import bucket
from ..errors import RequestError
from ..model import CausalLM, FlatModel, check_model
from .perplexity import nll
from .scores import padded, score_batch
from .windows import Batch


@dataclasses.dataclass(frozen=True)
class Continuation:
    """Tokens to be scored after others.

    Attributes:
        context: ids in front, at least one.
        continuation: ids to score, at least one.
    """

    context: Sequence[int]
    continuation: Sequence[int]


@dataclasses.dataclass(frozen=True)
class Likelihood:
    """Of one continuation.

    Attributes:
        log_likelihood: sum of the log-probabilities of its tokens, in nats.
        greedy: whether each of them is the most likely one where it stands.
    """

    log_likelihood: float
    greedy: bool


def likelihoods(
    model: CausalLM,
    requests: Sequence[Continuation],
    *,
    batch_size: int,
    max_model_len: int,
    progress: Callable[[int], None] = lambda done: None,
) -> list[Likelihood]:
    """Score continuations, the longest first, in batches of few shapes.

    Args:
        model: the model.
        requests: what to score. A context that is too long loses its first tokens.
        batch_size: requests in one forward pass.
        max_model_len: most tokens of one request in a forward pass.
        progress: called with the number of requests of each finished batch.

    Raises:
        RequestError: an empty context or continuation, or one with more tokens than fit.
        FloatingPointError: NaN or infinite logits; names the request.
    """
    check_model(model)
    for number, request in enumerate(requests):
        _check(number, request, max_model_len)
    order = sorted(range(len(requests)), key=lambda number: -_length(requests[number]))
    results: dict[int, Likelihood] = {}
    flat = FlatModel.of(model)
    for begin in range(0, len(order), batch_size):
        numbers = order[begin : begin + batch_size]
        results |= _run(flat, requests, numbers, batch_size, max_model_len)
        progress(len(numbers))
    return [results[number] for number in range(len(requests))]


def rolling(tokens: Sequence[int], prefix: int, max_model_len: int) -> Iterator[Continuation]:
    """A text cut so that each token is scored once.

    The first piece stands behind `prefix`, each further one behind the token before it, and the
    last one behind as much of the text as there is room for.

    Args:
        tokens: ids of the text.
        prefix: the id that the first token is scored behind.
        max_model_len: most tokens that the model reads at a time.
    """
    for begin in range(0, len(tokens), max_model_len):
        end = min(begin + max_model_len, len(tokens))
        behind = tokens[max(end - max_model_len - 1, 0) : begin]
        yield Continuation(behind if begin else [prefix], tokens[begin:end])


def _check(number: int, request: Continuation, max_model_len: int) -> None:
    if not len(request.context) or not len(request.continuation):
        raise RequestError(
            f"request {number} has {len(request.context)} tokens of context and "
            f"{len(request.continuation)} to score; both need at least one"
        )
    if len(request.continuation) > max_model_len:
        raise RequestError(
            f"request {number} has {len(request.continuation)} tokens to score, more than "
            f"the {max_model_len} that the model reads at a time"
        )


def _length(request: Continuation) -> int:
    return len(request.context) + len(request.continuation)


def _run(
    model: FlatModel,
    requests: Sequence[Continuation],
    numbers: Sequence[int],
    batch_size: int,
    max_model_len: int,
) -> dict[int, Likelihood]:
    batch = _batch([requests[number] for number in numbers], numbers, batch_size, max_model_len)
    losses, greedy = [], []
    for scores in score_batch(model, batch, lambda number: f"request {number}"):
        losses.append(nll(scores, "the model"))
        best = np.asarray(_is_best(scores.log_probabilities, padded(scores.targets)))
        greedy.append(best[: len(scores.targets)])
    loss, best = np.concatenate(losses), np.concatenate(greedy)
    return {
        number: Likelihood(
            -float(loss[batch.numbers == number].sum()), bool(best[batch.numbers == number].all())
        )
        for number in numbers
    }


def _batch(
    requests: Sequence[Continuation], numbers: Sequence[int], rows: int, max_model_len: int
) -> Batch:
    """The requests in a batch whose width is a power of two, or the most that there is room for."""
    # The last token is only ever predicted, so that the model reads one less.
    read = [[*request.context, *request.continuation][:-1][-max_model_len:] for request in requests]
    width = bucket(max(map(len, read)), max_model_len)
    tokens, lengths = np.zeros((rows, width), np.int32), np.zeros(rows, np.int32)
    positions, targets, of = [], [], []
    for row, (request, ids) in enumerate(zip(requests, read, strict=True)):
        scored = len(request.continuation)
        tokens[row, : len(ids)], lengths[row] = ids, len(ids)
        positions.append(row * width + np.arange(len(ids) - scored, len(ids)))
        targets.append(np.array(request.continuation))
        of.append(np.full(scored, numbers[row]))
    joined = [np.concatenate(part).astype(np.int32) for part in (positions, targets, of)]
    return Batch(tokens, lengths, *joined)


@jax.jit
def _is_best(
    log_probabilities: Float[Array, "R V"], targets: Int[Array, " R"] | np.ndarray
) -> Bool[Array, " R"]:
    return jnp.argmax(log_probabilities, axis=-1) == targets
