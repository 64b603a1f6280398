"""Sampling: options for a caller, arrays for the device, and the rule from logits to a token."""

import dataclasses
import json
import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ..errors import CheckpointError, RequestError
from ..pytree import pytree
from ..whole_number import is_whole

if TYPE_CHECKING:
    from .state import DecodeState

LARGEST_SEED = 2**32 - 1

_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
_FILTERS = ("temperature", "top_k", "top_p", "min_p")
# Rules that are not implemented, each with the values that switch it off.
_NOT_IMPLEMENTED: dict[str, tuple[object, ...]] = {
    "bad_words_ids": (None, []),
    "begin_suppress_tokens": (None, []),
    "dola_layers": (None,),
    "encoder_no_repeat_ngram_size": (None, 0),
    "encoder_repetition_penalty": (None, 1),
    "epsilon_cutoff": (None, 0),
    "eta_cutoff": (None, 0),
    "exponential_decay_length_penalty": (None,),
    "force_words_ids": (None, []),
    "forced_bos_token_id": (None,),
    "forced_decoder_ids": (None, []),
    "forced_eos_token_id": (None,),
    "guidance_scale": (None, 1),
    "max_time": (None,),
    "min_length": (None, 0),
    "min_new_tokens": (None, 0),
    "no_repeat_ngram_size": (None, 0),
    "num_beams": (None, 1),
    "penalty_alpha": (None, 0),
    "sequence_bias": (None, {}),
    "stop_strings": (None, []),
    "suppress_tokens": (None, []),
    "token_healing": (None, False),
    "top_h": (None,),
    "typical_p": (None, 1),
    "watermarking_config": (None,),
}


@dataclasses.dataclass(frozen=True)
class SamplingOptions:
    """How to choose the next token of one sequence. The defaults are greedy.

    Attributes:
        temperature: 0 takes the most likely token; above, logits are divided by it.
        top_k: keep the k most likely tokens; 0 or -1 keeps all, so does a k beyond the vocabulary.
        top_p: keep the most likely tokens until their mass reaches top_p, always at least one; 0
            keeps exactly one.
        min_p: keep tokens with at least min_p times the probability of the most likely one.
        repetition_penalty: above 1, logits of tokens in prompt or output are divided (positive) or
            multiplied (negative) by it, once a token.
        presence_penalty: subtracted from the logits of tokens in the output, once a token.
        frequency_penalty: subtracted from the logits of tokens in the output, once an occurrence.
        seed: 0 to 2^32 - 1; the row's tokens depend on nothing else of the batch. None draws a new
            one.

    Raises:
        RequestError: a value outside its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None

    def __post_init__(self):
        _check(self, "temperature", 0.0, math.inf, "a number from 0 (greedy) on")
        _check(self, "top_p", 0.0, 1.0, "a number from 0 to 1")
        _check(self, "min_p", 0.0, 1.0, "a number from 0 to 1")
        _check(self, "presence_penalty", -math.inf, math.inf, "a finite number")
        _check(self, "frequency_penalty", -math.inf, math.inf, "a finite number")
        _check(self, "repetition_penalty", 0.0, math.inf, "a number above 0; 1 is off")
        if self.repetition_penalty == 0:
            raise RequestError("repetition_penalty is 0; accepted is a number above 0; 1 is off")
        if not is_whole(self.top_k) or self.top_k < -1:
            raise RequestError(
                f"top_k is {self.top_k!r}; accepted is a whole number from 1 on, or 0 or -1 for "
                f"no limit"
            )
        if self.seed is not None and not (is_whole(self.seed) and 0 <= self.seed <= LARGEST_SEED):
            raise RequestError(
                f"seed is {self.seed!r}; accepted is a whole number from 0 to {LARGEST_SEED}, or "
                f"None"
            )

    @property
    def is_greedy(self) -> bool:
        """Whether the model's most likely token is taken, without penalties."""
        plain = self.repetition_penalty == 1 and not (
            self.presence_penalty or self.frequency_penalty
        )
        return plain and self.temperature == 0

    @classmethod
    def from_generation_config(cls, folder: str | Path) -> "SamplingOptions":
        """The `generation_config.json` of a folder; greedy where it says so or is absent.

        Raises:
            CheckpointError: the file is damaged or holds a value outside its range.

        Warns:
            UserWarning: the file asks for a rule that is not implemented.
        """
        path, values = Path(folder) / "generation_config.json", read_generation_config(folder)
        sampled = values.get("do_sample") or False
        if not isinstance(sampled, bool):
            raise CheckpointError(f"{path}: do_sample is {sampled!r}; accepted is true or false")
        names = _PENALTIES + (_FILTERS if sampled else ())
        given: dict[str, Any] = {"temperature": 1.0} if sampled else {}
        given |= {name: values[name] for name in names if values.get(name) is not None}
        unknown = [name for name, off in _NOT_IMPLEMENTED.items() if values.get(name) not in off]
        if unknown:
            warnings.warn(f"{path}: {', '.join(unknown)} not implemented; ignored", stacklevel=2)
        try:
            return cls(**given)
        except RequestError as error:
            raise CheckpointError(f"{path}: {error}") from error


def read_generation_config(folder: str | Path) -> dict[str, Any]:
    """The content of a folder's `generation_config.json`; empty if there is none."""
    path = Path(folder) / "generation_config.json"
    if not path.exists():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path}: not readable as JSON ({error}); mend or remove the file"
        ) from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: holds a {type(values).__name__}; accepted is a JSON object")
    return values


def _check(options: SamplingOptions, name: str, low: float, high: float, accepted: str) -> None:
    value = getattr(options, name)
    number = isinstance(value, int | float | np.integer | np.floating)
    number &= not isinstance(value, bool)
    if not number or not math.isfinite(value) or not low <= value <= high:
        raise RequestError(f"{name} is {value!r}; accepted is {accepted}")


@pytree
class SamplingParams:
    """`SamplingOptions` of B sequences as arrays [B]: float32, but top_k int32 and seed uint32."""

    temperature: Array
    top_k: Array
    top_p: Array
    min_p: Array
    repetition_penalty: Array
    presence_penalty: Array
    frequency_penalty: Array
    seed: Array

    @classmethod
    def stack(cls, options: Sequence[SamplingOptions]) -> "SamplingParams":
        """One row an option; rows without a seed get a fresh random one."""
        fresh = np.random.default_rng().integers(0, LARGEST_SEED, len(options), endpoint=True)
        seeds = [
            o.seed if o.seed is not None else int(s) for o, s in zip(options, fresh, strict=True)
        ]
        columns: dict[str, Array] = {"seed": jnp.asarray(np.array(seeds, np.uint32))}
        for field in dataclasses.fields(SamplingOptions):
            if field.name != "seed":
                values = [getattr(o, field.name) for o in options]
                columns[field.name] = _column(
                    values, "int32" if field.name == "top_k" else "float32"
                )
        return cls(**columns)


def _column(values: Sequence[int | float | np.number], dtype: str) -> Array:
    """The values in a type that is narrower than Python's; those beyond become the utmost.

    Floats end at 1e30, whose reciprocal float32 still holds.
    """
    utmost = np.iinfo(dtype).max if dtype == "int32" else 1e30
    clipped = [min(max(value, -utmost), utmost) for value in map(float, values)]
    return jnp.asarray(np.array(clipped, dtype))


def sample(logits: Float[Array, "B V"], state: "DecodeState") -> Int[Array, " B"]:
    """Penalties, temperature, top-k, top-p and min-p in transformers' order, then a draw.

    Args:
        logits: float32; ids beyond the tokenizer are already at -inf.
        state: supplies options, history and the number of tokens drawn so far.
    """
    if state.sampling is None:
        return _greedy(logits, state)
    return jax.lax.cond(_any_option(state.sampling), _draw, _greedy, logits, state)


def _greedy(logits: Float[Array, "B V"], _: "DecodeState") -> Int[Array, " B"]:
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def _draw(logits: Float[Array, "B V"], state: "DecodeState") -> Int[Array, " B"]:
    """A draw for the rows with a temperature, the most likely token for the others."""
    params = _params(state)
    logits = penalise(logits, state)
    noise = jax.vmap(_gumbel, in_axes=(0, 0, None))(params.seed, state.count, logits.shape[1])
    drawn = jnp.argmax(keep_likely(logits, params) + noise, axis=-1).astype(jnp.int32)
    return jnp.where(params.temperature > 0, drawn, _greedy(logits, state))


def _gumbel(seed: Array, count: Array, size: int) -> Array:
    """Noise that depends on the row's seed and its number of tokens, and on nothing else."""
    return jax.random.gumbel(jax.random.fold_in(jax.random.key(seed), count), (size,), jnp.float32)


def _any_option(params: SamplingParams) -> Bool[Array, ""]:
    """Whether any row asks for more than its most likely token."""
    return jnp.any(
        (params.temperature > 0)
        | (params.repetition_penalty != 1)
        | (params.presence_penalty != 0)
        | (params.frequency_penalty != 0)
    )


def _params(state: "DecodeState") -> SamplingParams:
    if state.sampling is None:
        raise RequestError("the state has no sampling options; give them to init_state")
    return state.sampling


def penalise(logits: Float[Array, "B V"], state: "DecodeState") -> Float[Array, "B V"]:
    """Repetition penalty over prompt and output; presence and frequency over the output alone."""
    params = _params(state)
    repeat = params.repetition_penalty[:, None]
    seen = state.in_prompt | (state.occurrences > 0)
    scaled = jnp.where(logits > 0, logits / repeat, logits * repeat)
    logits = jnp.where(seen, scaled, logits)
    count = state.occurrences.astype(jnp.float32)
    logits = logits - params.presence_penalty[:, None] * jnp.minimum(count, 1.0)
    return logits - params.frequency_penalty[:, None] * count


def keep_likely(logits: Float[Array, "B V"], params: SamplingParams) -> Float[Array, "B V"]:
    """Logits over the temperature, -inf where top-k, top-p or min-p drop a token.

    Tokens are ranked once, by falling logit and rising id, so that exactly k survive top-k whatever
    ties there are.
    """
    vocabulary = logits.shape[1]
    temperature = jnp.where(params.temperature > 0, params.temperature, 1.0)
    # From the largest logit down, so that a tiny temperature overflows to -inf and never to +inf.
    scaled = (logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature[:, None]
    # By two keys, although one would do in a stable sort: XLA leaves one key to a library, which
    # cannot be a part of a CUDA graph, and the whole decode loop would go through the host.
    ids = jax.lax.broadcasted_iota(jnp.int32, scaled.shape, 1)
    falling, order = jax.lax.sort((-scaled, ids), dimension=1, num_keys=2)
    ranked, rank = -falling, ids
    limit = jnp.where(params.top_k > 0, params.top_k, vocabulary)[:, None]
    ranked = jnp.where(rank < limit, ranked, -jnp.inf)
    probability = jax.nn.softmax(ranked, axis=-1)
    before = jnp.cumsum(probability, axis=-1) - probability
    kept = (before < params.top_p[:, None]) | (params.top_p[:, None] >= 1)
    kept &= probability >= params.min_p[:, None] * probability[:, :1]
    kept = (kept | (rank == 0)) & jnp.isfinite(ranked)
    rows = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
    keep = jnp.zeros(logits.shape, jnp.bool_).at[rows, order].set(kept)
    return jnp.where(keep, scaled, -jnp.inf)
