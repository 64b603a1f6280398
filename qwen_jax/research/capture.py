"""The routing of text: forward passes in chunks, of which little is kept."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from ..cache import Cache, init_cache, release
from ..decode import prefill
from ..decode.prompt import check_ids, default_chunk_size, pad
from ..errors import RequestError
from ..memory import accelerator_memory
from ..model import Capture, CausalLM, FlatModel, Routing, RoutingTrace, check_model, whole
from ..model.intervention import sparse_layers
from ..whole_number import check_whole
from .counts import RoutingCounts
from .trace import join_traces, trace_of

DEFAULT_BATCH_SIZE = 4


class Piece(NamedTuple):
    """The routing of one forward pass.

    Attributes:
        trace: of its tokens, on the host; None if only counts were asked for.
        counts: of all tokens up to here, on the device; donated to the next pass.
    """

    trace: RoutingTrace | None
    counts: RoutingCounts


def trace_text(
    model: CausalLM,
    sequences: Sequence[Sequence[int] | np.ndarray],
    *,
    capture: Capture = "ids",
    probabilities: bool = False,
    batch_size: int = DEFAULT_BATCH_SIZE,
    chunk_size: int | None = None,
) -> Iterator[Piece]:
    """Run a model over token sequences and yield the routing chunk by chunk.

    Each sequence is read from its beginning, with all that comes before a token as its context,
    through a cache. Device and host hold the routing of one chunk at a time: keep the pieces,
    reduce them, or `save_trace` each. `collect` keeps them all.

    Args:
        model: the model.
        sequences: token ids; of different lengths if you like.
        capture: "none" for counts alone; "ids"; or "full" for the logits too, 4 L E bytes a token.
        probabilities: let the counts hold the sums of the router's probabilities.
        batch_size: sequences in one forward pass.
        chunk_size: most tokens of a sequence in one pass; as `prefill_prompts` chooses if None.

    Raises:
        RequestError: a dense model, another capture, no sequence, an empty one, one longer than the
            model's context, an id outside the vocabulary, or a size below 1.
    """
    check_model(model)
    sparse_layers(model.config)
    if capture not in ("none", "ids", "full"):
        raise RequestError(f'capture is {capture!r}; accepted are "none", "ids" and "full"')
    lists = [s.tolist() if isinstance(s, np.ndarray) else s for s in sequences]
    _check(model, lists, {"batch_size": batch_size, "chunk_size": chunk_size})
    chunk_size = chunk_size or default_chunk_size(batch_size, accelerator_memory())
    counts = RoutingCounts.zeros(model.config, "full" if probabilities else "ids")
    return _pieces(model, lists, counts, capture, batch_size, chunk_size)


def _pieces(
    model: CausalLM,
    sequences: Sequence[Sequence[int]],
    counts: RoutingCounts,
    capture: Capture,
    batch_size: int,
    chunk_size: int,
) -> Iterator[Piece]:
    flat = FlatModel.of(model)
    longest = max(len(sequence) for sequence in sequences)
    cache = init_cache(model.config, batch_size, longest)
    for first in range(0, len(sequences), batch_size):
        rows = [*sequences[first : first + batch_size]]
        rows += [()] * (batch_size - len(rows))
        cache = _emptied(cache)
        for begin in range(0, max(len(row) for row in rows), chunk_size):
            tokens, lengths = pad([row[begin : begin + chunk_size] for row in rows], chunk_size)
            routing, counts, cache = _pass(flat, cache, counts, tokens, lengths, capture)
            numbers = np.arange(first, first + batch_size)
            found = None
            if capture != "none":
                found = trace_of(model.config, routing, tokens, lengths, sequences=numbers)
            yield Piece(found, counts)


def collect(pieces: Iterable[Piece]) -> Piece:
    """All pieces' traces joined, and the counts of all tokens.

    Raises:
        RequestError: there is no piece.
    """
    traces, counts = [], None
    for piece in pieces:
        counts = piece.counts
        if piece.trace is not None:
            traces.append(piece.trace)
    if counts is None:
        raise RequestError("there is no piece to collect; give those of one `trace_text`")
    return Piece(join_traces(traces) if traces else None, counts)


@functools.partial(jax.jit, static_argnames=("capture",), donate_argnames=("cache", "counts"))
def _pass(
    model: FlatModel,
    cache: Cache,
    counts: RoutingCounts,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    capture: Capture,
) -> tuple[dict[int, Routing], RoutingCounts, Cache]:
    """The head is not run: nothing reads the logits."""
    wanted = "full" if "full" in (capture, counts.capture) else "ids"
    output, cache = prefill(whole(model), cache, tokens, lengths, capture=wanted)
    valid = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :] < lengths[:, None]
    counts = counts.add(output.routing, valid)
    kept = {} if capture == "none" else output.routing
    return {layer: choice.captured(capture) for layer, choice in kept.items()}, counts, cache


@functools.partial(jax.jit, donate_argnames=("cache",))
def _emptied(cache: Cache) -> Cache:
    return release(cache, jnp.ones(cache.length.shape, jnp.bool_))


def _check(
    model: CausalLM, sequences: Sequence[Sequence[int]], sizes: dict[str, int | None]
) -> None:
    for name, size in sizes.items():
        if size is not None:
            check_whole(name, size, 1)
    if len(sequences) == 0:
        raise RequestError("there is no sequence; give at least one list of token ids")
    limit = model.config.max_position_embeddings
    for number, sequence in enumerate(sequences):
        check_ids(sequence, model.config.vocab_size, number)
        if len(sequence) > limit:
            raise RequestError(
                f"sequence {number} has {len(sequence)} tokens, but the context of the model is "
                f"{limit}; cut it"
            )
