"""Two drivers over one step: the whole loop inside jit, and a Python stream.

They give the same tokens.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from ..cache import Cache
from ..errors import CacheFullError
from ..model import CausalLM, FlatModel, Intervention, check_model, whole
from .carry import Carry, Packing
from .options import LOOP_OPTIONS
from .sampling import sample
from .state import DecodeState, FinishReason, SampleRule, Steering, advance, init_state
from .step import decode_step

STEPS_BETWEEN_LOOKS = 16


def decode_loop(
    model: CausalLM,
    cache: Cache,
    state: DecodeState,
    *,
    sample: SampleRule = sample,
    max_steps: int | Int[Array, ""] | None = None,
    intervention: Intervention | Steering | None = None,
) -> tuple[DecodeState, Cache]:
    """Generate until every row has ended, in one `lax.while_loop`.

    Pure; call it under jit with cache and state donated.

    Args:
        model: the model.
        cache: holds each row's prompt, and its output but for `state.last`.
        state: from `init_state`; its observer sees each step.
        sample: the sampling rule (static under jit).
        max_steps: stop after so many steps even if rows go on; may be traced. Calling again
            continues.
        intervention: what to change in the routing, or what says so anew for each step; give the
            prompt's prefill the same one if it is to count there.

    Returns:
        State and cache. Look at `state.reason`: a row with CACHE_FULL ran out of blocks, one with
        NOT_FINITE met NaN or infinite logits; neither took a token then.
    """
    columns = state.tokens.shape[1]
    limit = columns if max_steps is None else jnp.minimum(max_steps, columns)
    # Each step gives each active row one token, so the counts tell how many steps there were.
    last = state.count + limit
    packing = Packing((state, cache), state.count.shape[0])

    def goes_on(carry: Carry) -> Array:
        state, _ = packing.unpack(carry)
        return jnp.any(state.active & (state.count < last))

    def step(carry: Carry) -> Carry:
        state, cache = packing.unpack(carry)
        output, cache = decode_step(
            model,
            cache,
            state.last,
            active=state.active,
            capture="none" if state.observer is None else state.observer.capture,
            intervention=_now(intervention, state),
        )
        if state.observer is not None:
            observer = state.observer.observe(output, state.active & ~cache.overflow)
            state = dataclasses.replace(state, observer=observer)
        return packing.pack((advance(state, output.logits, cache.overflow, sample), cache))

    return packing.unpack(jax.lax.while_loop(goes_on, step, packing.pack((state, cache))))


def _now(intervention: Intervention | Steering | None, state: DecodeState) -> Intervention | None:
    if intervention is None or isinstance(intervention, Intervention):
        return intervention
    return intervention.in_state(state)


start = jax.jit(init_state, static_argnames=("capacity", "sample"))
"""`init_state` compiled; give `capacity`, and arrays for the rest."""


@functools.partial(
    jax.jit,
    static_argnames=("sample",),
    donate_argnames=("cache", "state"),
    compiler_options=LOOP_OPTIONS,
)
def run_steps(
    model: CausalLM | FlatModel,
    cache: Cache,
    state: DecodeState,
    *,
    sample: SampleRule = sample,
    **options: Any,
) -> tuple[DecodeState, Cache]:
    """`decode_loop` compiled, with cache and state donated."""
    return decode_loop(whole(model), cache, state, sample=sample, **options)


def stream(
    model: CausalLM,
    cache: Cache,
    state: DecodeState,
    *,
    sample: SampleRule = sample,
    intervention: Intervention | Steering | None = None,
    flat: FlatModel | None = None,
) -> Iterator[tuple[DecodeState, Cache]]:
    """Yield the state as it grows: at once, after 1, 2, 4, ... steps, and then every 16.

    Looking at tokens costs a trip to the device, so the looks get rarer; a program is compiled once
    for all of them. Each yielded state and cache is donated by the next step: read what you need
    before going on.

    Args:
        model: the weights.
        cache: as the prompts left it.
        state: from `start`.
        sample: how each next token is chosen.
        intervention: what to change in the routing, of each step.
        flat: the same model, for callers that flatten it once and not at each call.

    Raises:
        RequestError: no model, or an intervention that is not for it or its routers.
        CacheFullError: a row ran out of blocks.
        FloatingPointError: the model computed NaN or infinite logits.
    """
    check_model(model)
    raise_on_failure(state, cache)
    yield state, cache
    if (now := _now(intervention, state)) is not None:
        model.check_intervention(now, state.count.shape[0])
    flat = FlatModel.of(model) if flat is None else flat
    steps = 1
    while bool(jnp.any(state.active)):
        state, cache = run_steps(
            flat,
            cache,
            state,
            sample=sample,
            max_steps=jnp.int32(steps),
            intervention=intervention,
        )
        raise_on_failure(state, cache)
        yield state, cache
        steps = min(2 * steps, STEPS_BETWEEN_LOOKS)


def raise_on_failure(state: DecodeState, cache: Cache) -> None:
    """Turn the flags of failed rows into an error that names them."""
    reason, overflow = jax.device_get((state.reason, cache.overflow))
    full = [
        row for row, why in enumerate(reason) if why == FinishReason.CACHE_FULL or overflow[row]
    ]
    if full:
        lengths = [int(n) for n in jax.device_get(cache.length)]
        raise CacheFullError(
            f"cache: rows {full} found no free block; lengths are {lengths} with "
            f"{cache.block_size} tokens a block and "
            f"{cache.blocks.free.shape[0] - 1} blocks in the pool; use a larger max_length or "
            f"num_blocks, or fewer rows"
        )
    broken = [row for row, why in enumerate(reason) if why == FinishReason.NOT_FINITE]
    if broken:
        raise FloatingPointError(
            f"rows {broken}: the model gave NaN or infinite logits; check the weights, or use "
            f"dtype float32"
        )
