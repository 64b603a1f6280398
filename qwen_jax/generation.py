"""Text in, text out: `generate` and `stream_generate` over the functions of `qwen_jax.decode`."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import overload

import jax
import jax.numpy as jnp
import numpy as np

from .cache import Cache, check_kv_cache_dtype, init_cache
from .compile_time import running_time
from .decode import (
    SamplingOptions,
    SamplingParams,
    prefill_prompts,
    start,
    stream,
)
from .decode.prompt import bucket, check_ids
from .errors import RequestError
from .model import CausalLM, FlatModel, Intervention, check_model
from .text import Tokenizer, stop_token_ids
from .transcript import GenerationResult, Transcript, join
from .whole_number import check_whole

DEFAULT_MAX_TOKENS = 256

Prompt = str | Sequence[int]


@overload
def generate(  # pyright: ignore[reportOverlappingOverload]: text is a sequence of texts
    model: CausalLM, tokenizer: Tokenizer | None, prompt: Prompt, **options
) -> GenerationResult: ...
@overload
def generate(
    model: CausalLM, tokenizer: Tokenizer | None, prompt: Sequence[Prompt], **options
) -> list[GenerationResult]: ...
def generate(model, tokenizer, prompt, **options):
    """Generate to the end. Arguments and errors are those of `stream_generate`.

    Returns:
        A `GenerationResult`, or a list of them where `prompt` is a list of prompts.
    """
    single, prompts = _as_batch(prompt)
    pieces: list[list[GenerationResult]] = [[] for _ in prompts]
    for piece in stream_generate(model, tokenizer, prompts, **options):
        pieces[piece.index].append(piece)
    results = [join(row) for row in pieces]
    return results[0] if single else results


def stream_generate(
    model: CausalLM,
    tokenizer: Tokenizer | None,
    prompt: Prompt | Sequence[Prompt],
    *,
    max_tokens: int | None = None,
    sampling: SamplingOptions | Sequence[SamplingOptions] | None = None,
    stop: str | Sequence[str] | None = (),
    ignore_eos: bool = False,
    max_model_len: int | None = None,
    prefill_chunk_size: int | None = None,
    kv_cache_dtype: str | None = None,
    intervention: Intervention | None = None,
) -> Iterator[GenerationResult]:
    """Generate, yielding one piece a token of each row.

    Args:
        model: from `qwen_jax.load`.
        tokenizer: from `qwen_jax.load`; None if prompts are ids and no text is wanted.
        prompt: a string (used as it is, without chat template), a list of ids, or a list of either.
        max_tokens: most new tokens a prompt. 0 gives an empty result. None: 256, or what the
            context has room for.
        sampling: options for all prompts, or one for each; greedy if None.
        stop: strings that end a generation; they are not part of the text. One that is a special
            token, such as "<|im_end|>", ends it at that token.
        ignore_eos: go on through the model's end tokens, but for those in `stop`.
        max_model_len: most tokens of prompt and generation together; the model's own limit if None.
        prefill_chunk_size: most prompt tokens a row in one forward pass. None: 512, and on a GPU up
            to 8192, as its memory and the number of prompts allow.
        kv_cache_dtype: "int8" keeps keys and values in about half the memory, slightly less exact;
            None keeps them in the model's dtype.
        intervention: what to change in the routing of prompts and new tokens; see
            `qwen_jax.research.interventions`.

    Raises:
        RequestError: a prompt, option or limit outside what is accepted; before any work on the
            device.
    """
    check_model(model)
    _, prompts = _as_batch(prompt)
    ids = [_encode(model, tokenizer, p, row) for row, p in enumerate(prompts)]
    longest = max(len(row) for row in ids)
    max_tokens = _check_limits(model, longest, max_tokens, max_model_len)
    if prefill_chunk_size is not None:
        check_whole("prefill_chunk_size", prefill_chunk_size, 1)
    check_kv_cache_dtype(kv_cache_dtype)
    params = _sampling_rows(sampling, len(ids))
    stops = _stop_strings(stop)
    if stops and tokenizer is None:
        raise RequestError("stop strings need a tokenizer; this model folder has none")
    rows = [Transcript(i, len(row), tokenizer, stops) for i, row in enumerate(ids)]
    ends = list(() if ignore_eos else model.config.eos_token_id)
    if tokenizer is not None:
        ends += stop_token_ids(stops, tokenizer.special_token_ids)
    length = _cache_length(longest + max_tokens)

    def empty_cache() -> Cache:
        return init_cache(model.config, len(ids), length, kv_cache_dtype=kv_cache_dtype)

    if intervention is not None:
        model.check_intervention(intervention, len(ids))
    return _run(
        model,
        empty_cache,
        ids,
        rows,
        params,
        max_tokens,
        tokenizer,
        ends,
        prefill_chunk_size,
        intervention,
    )


def _run(
    model: CausalLM,
    empty_cache: Callable[[], Cache],
    ids: list[list[int]],
    rows: list[Transcript],
    params: list[SamplingOptions],
    max_tokens: int,
    tokenizer: Tokenizer | None,
    ends: list[int],
    chunk_size: int | None,
    intervention: Intervention | None,
) -> Iterator[GenerationResult]:
    if max_tokens == 0:
        for row in rows:
            yield row.piece("", [], [], "length")
        return
    cache = empty_cache()
    begin = running_time()
    flat = FlatModel.of(model)
    logits, cache = prefill_prompts(
        model, cache, ids, chunk_size=chunk_size, intervention=intervention, flat=flat
    )
    state = start(
        logits,
        max_tokens=jnp.asarray(max_tokens, jnp.int32),
        capacity=bucket(max_tokens, max_tokens * 2),
        stop_ids=_stop_ids(ends),
        # A program that knows that it is greedy is simpler than one that asks.
        sampling=None if all(row.is_greedy for row in params) else SamplingParams.stack(params),
        vocab_size=_sampled_ids(model, tokenizer),
        overflow=cache.overflow,
        in_prompt=_tokens_present(ids, params, model.config.vocab_size),
    )
    jax.block_until_ready(state.count)
    elapsed = max(running_time() - begin, 1e-9)
    for row in rows:
        row.prompt_tps = sum(map(len, ids)) / elapsed
    for grown, _ in stream(model, cache, state, intervention=intervention, flat=flat):
        count, reason, tokens, logprobs = jax.device_get(
            (grown.count, grown.reason, grown.tokens, grown.logprobs)
        )
        for row in rows:
            yield from row.take(tokens, logprobs, int(count[row.index]), int(reason[row.index]))
        if all(row.finished for row in rows):
            return


def _as_batch(prompt: Prompt | Sequence[Prompt]) -> tuple[bool, list[Prompt]]:
    """Whether this is a single prompt, and the prompts."""
    if isinstance(prompt, str):
        return True, [prompt]
    if isinstance(prompt, np.ndarray | jax.Array):
        prompt = np.atleast_1d(np.asarray(prompt)).tolist()
    prompts = list(_iterable(prompt, "prompt"))
    if not prompts:
        raise RequestError("prompt is empty; give text or at least one token id")
    if not isinstance(prompts[0], Sequence) and np.ndim(prompts[0]) == 0:
        return True, [prompts]
    return False, prompts


def _iterable(value: Prompt | Sequence[Prompt], name: str) -> Iterable:
    """The value, if it may hold token ids or prompts."""
    unordered = isinstance(value, bytes | bytearray | Mapping | Set)
    if unordered or not isinstance(value, Iterable):
        raise RequestError(
            f"{name} is of type {type(value).__name__}; accepted are text, a list of token ids, or "
            "a list of either; messages go through tokenizer.apply_chat_template first"
        )
    return value


def _encode(model: CausalLM, tokenizer: Tokenizer | None, prompt: Prompt, row: int) -> list[int]:
    if not isinstance(prompt, str):
        ids = list(_iterable(prompt, f"prompt {row}"))
        check_ids(ids, model.config.vocab_size, row)
        return [int(token) for token in ids]
    if tokenizer is None:
        raise RequestError(
            f"prompt {row} is text, but this model folder has no tokenizer; give token ids instead"
        )
    ids = tokenizer.encode(prompt)
    check_ids(ids, model.config.vocab_size, row)
    return ids


def _check_limits(
    model: CausalLM, longest: int, max_tokens: int | None, max_model_len: int | None
) -> int:
    """The number of new tokens, or an error that names both numbers."""
    limit = model.config.max_position_embeddings if max_model_len is None else max_model_len
    limit = check_whole("max_model_len", limit, 1)
    if max_tokens is None:
        max_tokens = min(DEFAULT_MAX_TOKENS, max(limit - longest, 0))
    max_tokens = check_whole("max_tokens", max_tokens, 0)
    if longest + max_tokens > limit:
        raise RequestError(
            f"a prompt of {longest} tokens and max_tokens {max_tokens} need "
            f"{longest + max_tokens}, but the context is "
            f"{limit}; shorten the prompt, lower max_tokens, or raise max_model_len"
        )
    return max_tokens


def _sampling_rows(
    sampling: SamplingOptions | Sequence[SamplingOptions] | None, rows: int
) -> list[SamplingOptions]:
    if sampling is None or isinstance(sampling, SamplingOptions):
        return [sampling or SamplingOptions()] * rows
    options: list[SamplingOptions] = (
        list(sampling) if isinstance(sampling, Sequence) else [sampling]
    )
    if not all(isinstance(option, SamplingOptions) for option in options):
        raise RequestError(f"sampling is {sampling!r}; accepted are SamplingOptions")
    if len(options) != rows:
        raise RequestError(
            f"{len(options)} sampling options for {rows} prompts; give one, or one each"
        )
    return options


def _sampled_ids(model: CausalLM, tokenizer: Tokenizer | None) -> np.ndarray:
    """Number of ids that may be sampled: the head may be wider than the tokenizer."""
    vocabulary = model.config.vocab_size
    known = vocabulary if tokenizer is None else min(vocabulary, tokenizer.vocab_size)
    return np.asarray(known, np.int32)


def _stop_ids(ids: Sequence[int]) -> np.ndarray:
    """The ids, filled up with -1 to a multiple of 4, so that few shapes are ever compiled."""
    return np.array([*ids, *[-1] * max(-len(ids) % 4, 4 * (not ids))], np.int32)


def _tokens_present(
    ids: list[list[int]], params: list[SamplingOptions], vocab_size: int
) -> np.ndarray:
    """[B, V], True at the prompt's tokens; left empty where no row has a repetition penalty."""
    present = np.zeros((len(ids), vocab_size), np.bool_)
    for row, options in enumerate(params):
        if options.repetition_penalty != 1:
            present[row, ids[row]] = True
    return present


def _stop_strings(stop: str | Sequence[str] | None) -> list[str]:
    if isinstance(stop, str):
        return [stop]
    if not isinstance(stop, Iterable | None):
        raise RequestError(f"stop is {stop!r}; accepted is a string or a list of strings")
    return list(stop or ())


def _cache_length(tokens: int) -> int:
    """Tokens rounded up, so that few shapes are ever compiled.

    To a power of two up to 8192; above, where memory counts, to one of eight sizes an octave.
    """
    size = 64
    while size < tokens:
        size *= 2
    step = size if size <= 8192 else size // 16
    return -(-tokens // step) * step
