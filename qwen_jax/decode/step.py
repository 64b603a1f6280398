"""One forward pass over a cache: `prefill` for many new tokens, `decode_step` for one."""

import dataclasses
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from ..cache import Cache, allocate
from ..errors import RequestError
from ..model import Capture, CausalLM, Intervention, Routing, check_model
from ..pytree import pytree


@pytree
class StepOutput:
    """What a step computed.

    Attributes:
        logits: float32 [B, V] after the last real token of each row ([B, T, V] with `all_logits`).
            A row without a real token in this call has no meaningful logits.
        routing: layer number -> Routing, for the MoE layers; empty with capture "none".
    """

    logits: Array
    routing: dict[int, Routing]


def prefill(
    model: CausalLM,
    cache: Cache,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    *,
    padding: Literal["right", "left"] = "right",
    capture: Capture = "none",
    all_logits: bool = False,
    intervention: Intervention | None = None,
) -> tuple[StepOutput, Cache]:
    """Append tokens to the sequences in the cache. Pure; call it under jit with the cache donated.

    A long prompt may come in any number of calls: the result is the same up to rounding.

    Args:
        model: the model.
        cache: what the rows hold so far.
        tokens: int32 ids.
        lengths: real tokens of each row, 0 to T; a row with 0 stays as it is, and so does one
            with another number, whose `overflow` is set.
        padding: on which side of the real tokens the padding is.
        capture: how much of the routing to return (static).
        all_logits: logits of every position instead of the last one's (static).
        intervention: what to change in the routing. Its positions count from the first token of
            each sequence.

    Returns:
        The output and the new cache. A row that found no free block takes no token, has
        `cache.overflow` set and NaN as logits, so that no driver takes a token from it. With left
        padding the columns of the output are those of the tokens moved to the left.

    Raises:
        RequestError: no model, an unknown `padding` or `capture`, a number of rows that is not the
            cache's, or an intervention that is not for this model.
    """
    check_model(model)
    _check_rows(cache, tokens, lengths)
    if padding not in ("right", "left"):
        raise RequestError(f'padding is {padding!r}; accepted are "right" and "left"')
    if padding == "left":
        tokens = _to_the_left(tokens, lengths)
    impossible = (lengths < 0) | (lengths > tokens.shape[1])
    blocks = allocate(cache.blocks, jnp.where(impossible, 0, lengths), cache.block_size)
    blocks = dataclasses.replace(blocks, overflow=blocks.overflow | impossible)
    lengths = jnp.where(blocks.overflow, 0, lengths)
    output = model.forward(tokens, cache.layers, blocks.length, lengths, blocks.table, intervention)
    residual = output.residual
    if not all_logits and tokens.shape[1] == 1:
        residual = residual[:, 0]
    elif not all_logits:
        last = jnp.maximum(lengths - 1, 0)[:, None, None]
        residual = jnp.take_along_axis(residual, last, axis=1)[:, 0]
    blocks = dataclasses.replace(blocks, length=blocks.length + lengths)
    cache = dataclasses.replace(cache, blocks=blocks, layers=output.caches)
    logits = model.next_logits(residual)
    untaken = jnp.expand_dims(blocks.overflow, tuple(range(1, logits.ndim)))
    logits = jnp.where(untaken, jnp.nan, logits)
    return StepOutput(logits, output.captured(capture)), cache


def decode_step(
    model: CausalLM,
    cache: Cache,
    tokens: Int[Array, " B"],
    *,
    active: Bool[Array, " B"] | None = None,
    capture: Capture = "none",
    intervention: Intervention | None = None,
) -> tuple[StepOutput, Cache]:
    """Append one token to each sequence and return the logits of the next.

    Pure; call it under jit with the cache donated.

    Args:
        model: the model.
        cache: what the rows hold so far.
        tokens: int32 ids.
        active: rows that take their token; the others stay as they are. All if None.
        capture: how much of the routing to return (static).
        intervention: what to change in the routing.
    """
    lengths = jnp.ones_like(tokens) if active is None else active.astype(jnp.int32)
    options = {"capture": capture, "intervention": intervention}
    return prefill(model, cache, tokens[:, None], lengths, **options)


def _check_rows(cache: Cache, tokens: Array, lengths: Array) -> None:
    rows = cache.length.shape
    if tokens.ndim != 2 or tokens.shape[:1] != rows or lengths.shape != rows:
        raise RequestError(
            f"tokens of shape {tokens.shape} and lengths of shape {lengths.shape} for a cache of "
            f"{rows[0]} rows; accepted are tokens [{rows[0]}, T] and lengths [{rows[0]}]"
        )


def _to_the_left(tokens: Int[Array, "B T"], lengths: Int[Array, " B"]) -> Int[Array, "B T"]:
    """Rows padded on the left, moved so that they are padded on the right."""
    width = tokens.shape[1]
    index = jnp.arange(width, dtype=jnp.int32)[None, :] + (width - lengths)[:, None]
    return jnp.take_along_axis(tokens, index % width, axis=1)
