"""Prompts into a cache: padded to few lengths, so that nothing recompiles, and cut in chunks."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from ..cache import Cache
from ..errors import CacheFullError, RequestError
from ..memory import accelerator_memory
from ..model import CausalLM, FlatModel, Intervention, check_model, whole
from ..whole_number import check_whole
from .options import PREFILL_OPTIONS
from .step import StepOutput, prefill

CHUNK_SIZE = 512
LARGEST_CHUNK = 8192
SMALLEST_BUCKET = 16
# What a forward pass takes for a token beside weights and cache. XLA plans 140 KB of 2,048 tokens
# and 135 KB of 8,192 for the 35B shape in 3 bits.
TOKEN_BYTES = 144 << 10
# Of the memory that a device has in all.
MEMORY_SHARE = 64


@functools.partial(
    jax.jit,
    static_argnames=("padding", "capture", "all_logits"),
    donate_argnames=("cache",),
    compiler_options=PREFILL_OPTIONS,
)
def run_prefill(
    model: CausalLM | FlatModel,
    cache: Cache,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    **options: Any,
) -> tuple[StepOutput, Cache]:
    """`prefill` compiled, with the cache donated."""
    return prefill(whole(model), cache, tokens, lengths, **options)


def prefill_prompts(
    model: CausalLM,
    cache: Cache,
    prompts: Sequence[Sequence[int]],
    *,
    chunk_size: int | None = None,
    intervention: Intervention | None = None,
    flat: FlatModel | None = None,
) -> tuple[Array, Cache]:
    """Enter one prompt a row, chunk by chunk, and return the logits after each prompt's last token.

    Args:
        model: the model.
        cache: empty rows, or rows to continue; donated.
        prompts: token ids, one sequence a row; none may be empty.
        chunk_size: most tokens of a row in one call; memory grows with it. `default_chunk_size`
            if None.
        intervention: what to change in the routing, whatever the chunks: its positions count from
            the first token of each sequence.
        flat: the same model, for callers that flatten it once and not at each call.

    Returns:
        float32 logits [B, V], and the cache.

    Raises:
        RequestError: an empty prompt, a wrong number of prompts, an id outside the vocabulary, a
            chunk size below 1, or an intervention that is not for this model or its routers.
        CacheFullError: a prompt longer than its cache row has room for, more prompts than the pool
            has blocks for, or a row whose overflow flag is set. Checked before anything is entered.
    """
    check_prompts(model, cache, prompts, chunk_size)
    if intervention is not None:
        model.check_intervention(intervention, len(prompts))
    chunk_size = chunk_size or default_chunk_size(len(prompts), accelerator_memory())
    longest = max(len(prompt) for prompt in prompts)
    logits: Array | None = None
    flat = FlatModel.of(model) if flat is None else flat
    for begin in range(0, longest, chunk_size):
        pieces = [prompt[begin : begin + chunk_size] for prompt in prompts]
        tokens, lengths = pad(pieces, chunk_size)
        output, cache = run_prefill(flat, cache, tokens, lengths, intervention=intervention)
        logits = output.logits if logits is None else _merge(logits, output, lengths)
    assert logits is not None
    return logits, cache


def default_chunk_size(rows: int, memory: int | None) -> int:
    """Most tokens of a row in one forward pass: a power of two from 512 to 8,192.

    All rows' tokens together take no more than 1/64 of the device's memory, at `TOKEN_BYTES` each,
    but where 512 a row are more. It does not depend on what else is in memory, so that nothing is
    compiled again later.

    Args:
        rows: of the batch.
        memory: bytes of the accelerator in all; None, which gives 512, if there is none.
    """
    size = CHUNK_SIZE
    if memory is None:
        return size
    while size < LARGEST_CHUNK and 2 * size * rows * TOKEN_BYTES <= memory // MEMORY_SHARE:
        size *= 2
    return size


def pad(pieces: Sequence[Sequence[int]], chunk_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [B, T] padded on the right to a bucket length, and lengths [B]; int32."""
    lengths = np.array([len(piece) for piece in pieces], np.int32)
    tokens = np.zeros((len(pieces), bucket(int(lengths.max()), chunk_size)), np.int32)
    for row, piece in enumerate(pieces):
        tokens[row, : len(piece)] = piece
    return tokens, lengths


def bucket(length: int, largest: int) -> int:
    """The smallest power of two that holds `length`, from 16 on, but never above `largest`."""
    size = SMALLEST_BUCKET
    while size < length:
        size *= 2
    return min(size, max(largest, length))


@functools.partial(jax.jit, donate_argnums=0)
def _select(old: Array, new: Array, lengths: Array) -> Array:
    return jnp.where((lengths > 0)[:, None], new, old)


def _merge(logits: Array, output: StepOutput, lengths: np.ndarray) -> Array:
    """Keep the newest logits of rows that had tokens in this chunk."""
    return _select(logits, output.logits, jnp.asarray(lengths))


def check_prompts(
    model: CausalLM, cache: Cache, prompts: Sequence[Sequence[int]], chunk_size: int | None
) -> None:
    """Refuse prompts that the cache or the vocabulary cannot take."""
    check_model(model)
    rows = cache.blocks.table.shape[0]
    if chunk_size is not None:
        check_whole("chunk_size", chunk_size, 1)
    if len(prompts) != rows:
        raise RequestError(f"{len(prompts)} prompts for a cache of {rows} rows; give one a row")
    for row, prompt in enumerate(prompts):
        check_ids(prompt, model.config.vocab_size, row)
    _check_room(cache, np.array([len(prompt) for prompt in prompts]))


def _check_room(cache: Cache, new: np.ndarray) -> None:
    """Refuse prompts of these lengths if the cache has not the room for all of them."""
    blocks = jax.device_get(cache.blocks)
    if blocks.overflow.any():
        raise CacheFullError(
            f"cache: rows {np.flatnonzero(blocks.overflow).tolist()} ran out of blocks before; "
            "release them first"
        )
    room = blocks.table.shape[1] * cache.block_size - blocks.length
    for row in np.flatnonzero(new > room)[:1]:
        raise CacheFullError(
            f"prompt {row} has {new[row]} tokens, but its cache row has room for {room[row]}; "
            "make the cache with a larger max_length or shorten the prompt"
        )
    owned = np.count_nonzero(blocks.table, axis=1)
    needed = int(np.maximum(-(-(blocks.length + new) // cache.block_size) - owned, 0).sum())
    if needed > blocks.num_free:
        raise CacheFullError(
            f"the prompts need {needed} blocks of {cache.block_size} tokens, but the pool has "
            f"{blocks.num_free} free; make the cache with a larger num_blocks or give fewer prompts"
        )


def check_ids(prompt: Sequence[Any], vocab_size: int, row: int) -> None:
    """Refuse an empty prompt and ids outside the vocabulary."""
    if isinstance(prompt, int | np.integer):
        raise RequestError(f"prompt {row} is {prompt}; accepted is a list of token ids")
    if len(prompt) == 0:
        raise RequestError(f"prompt {row} is empty; give at least one token")
    try:
        ids = np.asarray(prompt)
    except ValueError:
        raise RequestError(f"prompt {row} is nested; accepted is a list of token ids") from None
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise RequestError(
            f"prompt {row} holds {ids.dtype} values; accepted is a list of token ids"
        )
    wrong = ids[(ids < 0) | (ids >= vocab_size)]
    if wrong.size:
        raise RequestError(
            f"prompt {row}: id {int(wrong[0])} is outside the vocabulary; accepted are 0 to "
            f"{vocab_size - 1}"
        )
