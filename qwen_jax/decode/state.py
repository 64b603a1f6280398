"""The state of a generation, carried through the decode loop."""

import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int, Shaped

from ..errors import RequestError
from ..model import Capture, Intervention
from ..pytree import pytree
from .sampling import SamplingOptions, SamplingParams, sample
from .step import StepOutput
from .summary import summarise

SampleRule = Callable[[Array, "DecodeState"], Array]
"""Your own rule: float32 logits [B, V] and the state -> int32 ids [B]. Pure and jittable."""

_DEFAULT_RULE = sample


class FinishReason(enum.IntEnum):
    """Why a row stopped; RUNNING while it has not."""

    RUNNING = 0
    STOP = 1
    LENGTH = 2
    CACHE_FULL = 3
    NOT_FINITE = 4


@runtime_checkable
class Observer(Protocol):
    """What looks at each step of a loop without leaving jit, and is carried in its state.

    A pytree whose arrays keep their shapes and dtypes, such as counts of the experts used.
    """

    @property
    def capture(self) -> Capture:
        """How much of the routing it wants to see.

        Static: a field with `metadata={"static": True}`, or an attribute of the class.
        """
        ...

    def observe(self, output: StepOutput, taken: Bool[Array, " B"]) -> "Observer":
        """The observer after one more step, of the same type and structure; pure.

        Args:
            output: of `decode_step`, or of `prefill` if you call this yourself. The ids of padding,
                and of rows that are not taken, are those of empty slots.
            taken: rows that entered tokens into the cache in this step. A loop goes on until its
                last row has ended; rows that ended before are False.
        """
        ...


@runtime_checkable
class Steering(Protocol):
    """An intervention that changes while a loop goes on; a pytree."""

    def in_state(self, state: "DecodeState") -> Intervention:
        """The intervention of the next step; pure, of one structure and shape.

        Args:
            state: before the step, with the observer that has seen those before.
        """
        ...


@pytree
class DecodeState:
    """B generations in flight.

    Attributes:
        tokens: int32 [B, N], generated ids; column i holds the i-th new token, 0 beyond `count`.
        logprobs: float32 [B, N], log-probability of each generated token under the model's own
            distribution (temperature 1, no filter, no penalty).
        count: int32 [B], generated tokens. A stop token counts.
        last: int32 [B], newest token, not yet in the cache.
        reason: int32 [B], a `FinishReason`.
        max_tokens: int32 [B], at most N.
        stop_ids: int32 [n], ids that end a row.
        vocab_size: int32 [], ids from here on are never sampled: the head may be wider than the
            tokenizer.
        sampling: options of each row; None if all rows are greedy, which a program then knows
            when it is compiled.
        in_prompt: bool [B, V], tokens of the prompt, for the repetition penalty.
        observer: sees each step of the loop; None if nothing does.
    """

    tokens: Array
    logprobs: Array
    count: Array
    last: Array
    reason: Array
    max_tokens: Array
    stop_ids: Array
    vocab_size: Array
    sampling: SamplingParams | None
    in_prompt: Array
    observer: Observer | None = None

    @property
    def active(self) -> Bool[Array, " B"]:
        """Rows that go on."""
        return self.reason == FinishReason.RUNNING

    @property
    def occurrences(self) -> Int[Array, "B V"]:
        """How often each token was generated; counted anew at each look, since few look."""
        rows, columns = (jnp.arange(n, dtype=jnp.int32) for n in self.tokens.shape)
        vocabulary = self.in_prompt.shape[1]
        generated = jnp.where(columns[None, :] < self.count[:, None], self.tokens, vocabulary)
        zeros = jnp.zeros((rows.shape[0], vocabulary), jnp.int32)
        return zeros.at[rows[:, None], generated].add(1, mode="drop")


def init_state(
    logits: Float[Array, "B V"],
    *,
    max_tokens: int | Int[Array | np.ndarray, ""] | Int[Array | np.ndarray, " B"],
    capacity: int | None = None,
    stop_ids: Sequence[int] | Int[Array | np.ndarray, " n"] = (),
    sampling: SamplingParams | SamplingOptions | None = None,
    vocab_size: int | Int[Array | np.ndarray, ""] | None = None,
    in_prompt: Shaped[Array | np.ndarray, "B V"] | None = None,
    overflow: Bool[Array, " B"] | None = None,
    sample: SampleRule = sample,
    observer: Observer | None = None,
) -> DecodeState:
    """Start generating from the logits after the prompt; the first token is drawn here.

    Args:
        logits: float32, from `prefill`.
        max_tokens: most new tokens of each row, from 1 on. It must be concrete unless `capacity` is
            given.
        capacity: columns of the output buffer, the most that a row can take; max_tokens if None.
        stop_ids: ids that end a row, such as `config.eos_token_id`.
        sampling: options of each row, or one for all; greedy if None.
        vocab_size: number of ids that may be sampled; V if None.
        in_prompt: [B, V], non-zero at the prompt's tokens; only the repetition penalty needs it.
            Where that is traced, nothing says that it is missing: the output alone counts then.
        overflow: `cache.overflow`: rows whose prompt did not fit end with CACHE_FULL. Without it
            they end with NOT_FINITE, since their logits are NaN.
        sample: the sampling rule; give the same one to the loop.
        observer: sees each step of the loop that follows, not the prompt; read it from the state,
            which takes its arrays, while all others are copied.

    Raises:
        RequestError: max_tokens (where it is concrete) or capacity below 1, a traced max_tokens
            without capacity, sampling of another number of rows, a wrong shape of in_prompt, a
            repetition penalty without it, or, under jit, options that draw without a seed.
    """
    batch, vocabulary = logits.shape
    _check_prompt(in_prompt, sampling, logits.shape)
    if isinstance(sampling, SamplingOptions):
        sampling = _same_for_all(sampling, logits)
    _check_counts(max_tokens, capacity, batch)
    if sampling is not None and sampling.seed.shape != (batch,):
        raise RequestError(
            f"sampling is of {sampling.seed.size} rows, and the logits of {batch}; give "
            "SamplingParams.stack one option a row, or one SamplingOptions for all"
        )
    if capacity is None:
        capacity = int(np.max(np.asarray(max_tokens)))
    max_tokens = jnp.minimum(jnp.asarray(max_tokens, jnp.int32), capacity)
    if in_prompt is None:
        in_prompt = jnp.zeros((batch, vocabulary), jnp.bool_)
    if overflow is None:
        overflow = jnp.zeros((batch,), jnp.bool_)
    zeros = jnp.zeros((batch,), jnp.int32)
    state = DecodeState(
        tokens=jnp.zeros((batch, capacity), jnp.int32),
        logprobs=jnp.zeros((batch, capacity), jnp.float32),
        count=zeros,
        last=zeros,
        reason=zeros,
        max_tokens=jnp.broadcast_to(max_tokens, (batch,)),
        # Copies: a loop that takes the state as a donation must not take the caller's arrays.
        stop_ids=jnp.array(stop_ids, jnp.int32).reshape(-1),
        vocab_size=jnp.array(vocabulary if vocab_size is None else vocab_size, jnp.int32),
        sampling=jax.tree.map(jnp.copy, sampling),
        in_prompt=jnp.array(in_prompt, jnp.bool_),
        observer=observer,
    )
    return advance(state, logits, overflow, sample)


def _check_counts(max_tokens: Any, capacity: int | None, batch: int) -> None:
    """Raise for numbers of tokens that are below 1, no whole ones, or unknown where they size."""
    if capacity is None and isinstance(max_tokens, Tracer):
        raise RequestError(
            "max_tokens is traced, and the output buffer needs a size: give init_state capacity, "
            "the most tokens that a row can take"
        )
    for name, value in {"max_tokens": max_tokens, "capacity": capacity}.items():
        if value is None or isinstance(value, Tracer):
            continue
        numbers = np.asarray(value)
        if numbers.dtype.kind not in "iu" or numbers.size == 0 or numbers.min() < 1:
            raise RequestError(f"{name} is {value!r}; accepted is a whole number from 1 on")
    if np.shape(max_tokens) not in ((), (batch,)):
        raise RequestError(
            f"max_tokens is of shape {np.shape(max_tokens)}; accepted is one number, or {batch}, "
            "one a row"
        )


def _check_prompt(
    in_prompt: Array | np.ndarray | None,
    sampling: SamplingParams | SamplingOptions | None,
    shape: tuple[int, ...],
) -> None:
    if in_prompt is not None and in_prompt.shape != shape:
        raise RequestError(f"in_prompt has shape {in_prompt.shape}; accepted is {shape}, [B, V]")
    penalty = 1.0 if sampling is None else sampling.repetition_penalty
    if in_prompt is None and not isinstance(penalty, Tracer) and np.any(np.asarray(penalty) != 1):
        raise RequestError("init_state: a repetition penalty needs in_prompt, the prompt's tokens")


def _same_for_all(options: SamplingOptions, logits: Array) -> SamplingParams:
    """The options for each row of the logits. Under jit a seed drawn here would be drawn once."""
    if isinstance(logits, Tracer) and options.temperature > 0 and options.seed is None:
        raise RequestError(
            "init_state: options without a seed cannot be used under jit, where every call would "
            "draw the same tokens; give a seed, or hand SamplingParams.stack(...) in as an argument"
        )
    return SamplingParams.stack([options] * logits.shape[0])


def advance(
    state: DecodeState,
    logits: Float[Array, "B V"],
    overflow: Bool[Array, " B"],
    sample: SampleRule,
) -> DecodeState:
    """Draw the next token of each active row and note which rows end with it.

    Args:
        state: before.
        logits: float32, after the newest token.
        overflow: rows that could not enter their newest token into the cache; they end without a
            new one.
        sample: the sampling rule.
    """
    seen = summarise(logits, state.vocab_size)
    if sample is _DEFAULT_RULE and state.sampling is None:
        token, logprob = seen.best, -seen.log_sum
    else:
        possible = jnp.arange(logits.shape[1], dtype=jnp.int32) < state.vocab_size
        logits = jnp.where(possible[None, :], logits, -jnp.inf)
        token = sample(logits, state)
        chosen = jnp.take_along_axis(logits, token[:, None], axis=1)[:, 0]
        logprob = chosen - seen.largest - seen.log_sum

    takes = state.active & ~overflow & seen.finite
    count = state.count + takes.astype(jnp.int32)
    reason = jnp.where(count >= state.max_tokens, FinishReason.LENGTH, FinishReason.RUNNING)
    reason = jnp.where(_among(token, state.stop_ids), FinishReason.STOP, reason)
    reason = jnp.where(seen.finite, reason, FinishReason.NOT_FINITE)
    reason = jnp.where(overflow, FinishReason.CACHE_FULL, reason)
    # A select over all columns: on a GPU one launch for both arrays, where scatters are four.
    column = jnp.arange(state.tokens.shape[1], dtype=jnp.int32)[None, :]
    new = takes[:, None] & (column == state.count[:, None])
    return dataclasses.replace(
        state,
        tokens=jnp.where(new, token[:, None], state.tokens),
        logprobs=jnp.where(new, logprob[:, None], state.logprobs),
        count=count,
        last=jnp.where(takes, token, state.last),
        reason=jnp.where(state.active, reason, state.reason).astype(jnp.int32),
    )


def _among(token: Int[Array, " B"], ids: Int[Array, " n"]) -> Bool[Array, " B"]:
    """Whether a token is one of a few ids; comparisons alone, which join what is around them."""
    found = jnp.zeros(token.shape, jnp.bool_)
    for number in range(ids.shape[0]):
        found |= token == ids[number]
    return found
