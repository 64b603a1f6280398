"""The loop inside jit and the Python stream take the tokens that single steps take."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from qwen_jax import CausalLM, init_cache
from qwen_jax.cache import Cache
from qwen_jax.decode import (
    DecodeState,
    FinishReason,
    SamplingOptions,
    SamplingParams,
    decode_loop,
    init_state,
    prefill,
    prefill_prompts,
    sample,
    stream,
)
from qwen_jax.decode.loop import run_steps
from qwen_jax.decode.prompt import run_prefill
from qwen_jax.decode.state import advance
from qwen_jax.errors import CacheFullError, RequestError
from tests.qwen_jax.decode.texts import run_step

CAPACITY = 64
MAX_LENGTH, BLOCK = 72, 3
GREEDY = SamplingOptions()
SAMPLED = [
    SamplingOptions(temperature=0.8, seed=1),
    SamplingOptions(temperature=1.2, top_k=9, top_p=0.9, seed=2, frequency_penalty=0.3),
    SamplingOptions(),
    SamplingOptions(temperature=1.0, min_p=0.02, seed=1, repetition_penalty=1.3),
]
jit_start = jax.jit(init_state, static_argnames=("capacity", "sample"))
jit_advance = jax.jit(advance, static_argnames="sample")


@pytest.fixture(scope="module")
def prompts(tiny: CausalLM) -> list[list[int]]:
    random = np.random.default_rng(5)
    return [random.integers(0, tiny.config.vocab_size, n).tolist() for n in (2, 4, 9, 16)]


def begin(
    model: CausalLM,
    prompts: Sequence[Sequence[int]],
    options: SamplingOptions | Sequence[SamplingOptions] = GREEDY,
    *,
    max_tokens: int | Sequence[int] = 50,
    stop_ids: Sequence[int] = (-1,),
    cache: Cache | None = None,
    **more: Any,
) -> tuple[Cache, DecodeState]:
    """Prompts in a cache, and the state after their first tokens."""
    rows = len(prompts)
    if cache is None:
        cache = init_cache(model.config, rows, MAX_LENGTH, block_size=BLOCK)
    logits, cache = prefill_prompts(model, cache, prompts, chunk_size=16)
    given = [options] * rows if isinstance(options, SamplingOptions) else list(options)
    present = np.zeros((rows, model.config.vocab_size), np.bool_)
    for row, prompt in enumerate(prompts):
        present[row, prompt] = True
    state = jit_start(
        logits,
        max_tokens=jnp.broadcast_to(jnp.asarray(max_tokens, jnp.int32), (rows,)),
        capacity=CAPACITY,
        stop_ids=jnp.asarray(stop_ids, jnp.int32),
        sampling=SamplingParams.stack(given),
        in_prompt=present,
        **more,
    )
    return cache, state


def outputs(state: DecodeState) -> list[list[int]]:
    """The tokens of each row; nothing may stand behind them."""
    tokens, count = np.asarray(state.tokens), np.asarray(state.count)
    assert not any(row[n:].any() for row, n in zip(tokens, count, strict=True))
    return [row[:n].tolist() for row, n in zip(tokens, count, strict=True)]


def reasons(state: DecodeState) -> list[FinishReason]:
    return [FinishReason(int(reason)) for reason in state.reason]


def step_by_step(model: CausalLM, cache: Cache, state: DecodeState) -> DecodeState:
    """The loop, written as single calls."""
    while state.active.any():
        output, cache = run_step(model, cache, state.last, active=state.active)
        state = jit_advance(state, output.logits, cache.overflow, sample=sample)
    return state


def loop(
    model: CausalLM, cache: Cache, state: DecodeState, steps: int = CAPACITY, **rule: Any
) -> tuple[DecodeState, Cache]:
    """The whole loop. The number of steps is always an argument: without it is another program."""
    return run_steps(model, cache, state, max_steps=jnp.int32(steps), **rule)


@pytest.fixture(scope="module")
def greedy(tiny: CausalLM, prompts: list[list[int]]) -> list[list[int]]:
    """50 greedy tokens of each prompt."""
    state, _ = loop(tiny, *begin(tiny, prompts))
    return outputs(state)


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_loop_stream_and_single_steps_agree(tiny, prompts, options):
    one_by_one = step_by_step(tiny, *begin(tiny, prompts, options))
    in_one, cache = loop(tiny, *begin(tiny, prompts, options))
    seen: list[int] = []
    # Only the last state is still there when the stream has ended.
    for last in stream(tiny, *begin(tiny, prompts, options)):
        seen.append(int(last[0].count[0]))
    assert seen[:4] == [1, 2, 4, 8]
    assert max(np.diff(seen)) <= 16
    for found, its_cache in ((in_one, cache), last):
        assert outputs(found) == outputs(one_by_one)
        np.testing.assert_allclose(found.logprobs, one_by_one.logprobs, atol=1e-5)
        assert reasons(found) == [FinishReason.LENGTH] * 4
        # The newest token is not in the cache.
        np.testing.assert_array_equal(its_cache.length, [len(p) + 49 for p in prompts])
    if options is GREEDY:
        assert len({tuple(row) for row in outputs(in_one)}) == 4


def test_a_row_draws_the_same_among_others(tiny, prompts):
    mine, _ = loop(tiny, *begin(tiny, prompts, SAMPLED))
    others = [[7], prompts[1], [1, 2, 3], prompts[3]]
    options = [SamplingOptions(temperature=3.0), SAMPLED[1], GREEDY, SAMPLED[3]]
    found, _ = loop(tiny, *begin(tiny, others, options, max_tokens=[9, 50, 3, 50]))
    assert outputs(found)[1::2] == outputs(mine)[1::2]
    assert outputs(found)[0] != outputs(mine)[0][:9]


def test_rows_end_each_at_its_own_limit(tiny, prompts, greedy):
    limits = [5, 50, 17, 1]
    cache, state = begin(tiny, prompts, max_tokens=limits)
    state, cache = loop(tiny, cache, state)
    assert outputs(state) == [row[:n] for row, n in zip(greedy, limits, strict=True)]
    assert reasons(state) == [FinishReason.LENGTH] * 4
    np.testing.assert_array_equal(
        cache.length, [len(p) + n - 1 for p, n in zip(prompts, limits, strict=True)]
    )


def test_rows_end_with_a_stop_token_which_counts(tiny, prompts, greedy):
    stop = greedy[2][8]
    state, _ = loop(tiny, *begin(tiny, prompts, stop_ids=[stop]))
    for found, tokens, reason in zip(outputs(state), greedy, reasons(state), strict=True):
        stops = stop in tokens
        assert found == (tokens[: tokens.index(stop) + 1] if stops else tokens)
        assert reason == (FinishReason.STOP if stops else FinishReason.LENGTH)


def test_a_stop_token_at_the_limit_is_a_stop(tiny, prompts, greedy):
    state, _ = loop(tiny, *begin(tiny, prompts, max_tokens=1, stop_ids=[greedy[0][0]]))
    assert reasons(state)[0] == FinishReason.STOP
    assert outputs(state) == [row[:1] for row in greedy]


def test_the_loop_goes_on_where_it_was_left(tiny, prompts):
    whole, _ = loop(tiny, *begin(tiny, prompts, SAMPLED))
    cache, state = begin(tiny, prompts, SAMPLED)
    for steps in (0, 1, 20, 3, 100):
        before = state.count[0]
        wanted = min(int(before) + steps, 50)
        state, cache = loop(tiny, cache, state, steps)
        assert int(state.count[0]) == wanted
    assert outputs(state) == outputs(whole)


def test_any_number_of_steps_is_one_program(tiny, prompts):
    traces = []

    def rule(logits: jax.Array, state: DecodeState) -> jax.Array:
        traces.append(1)
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)

    cache, state = begin(tiny, prompts)
    state, cache = loop(tiny, cache, state, 50, sample=rule)
    assert state.count.tolist() == [50] * 4
    once = len(traces)
    assert once <= 2
    for options, steps in ((SAMPLED, 1), (GREEDY, 49)):
        cache, state = begin(tiny, prompts[::-1], options, max_tokens=steps + 1)
        loop(tiny, cache, state, steps, sample=rule)
    assert len(traces) == once


def nbytes(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def test_the_cache_is_updated_in_place(no_type_checks, tiny, prompts):
    _, state = begin(tiny, prompts)
    cache = init_cache(tiny.config, 4, MAX_LENGTH, block_size=BLOCK, num_blocks=60_000)
    size, steps = nbytes(cache), jnp.int32(4)
    tokens, lengths = np.ones((4, 16), np.int32), np.ones(4, np.int32)
    for compiled in (
        run_steps.lower(tiny, cache, state, max_steps=steps).compile(),
        run_prefill.lower(tiny, cache, tokens, lengths).compile(),
    ):
        memory = compiled.memory_analysis()
        assert memory.alias_size_in_bytes >= size
        assert memory.temp_size_in_bytes < size / 10


def test_donated_arrays_are_gone(tiny, prompts):
    cache, state = begin(tiny, prompts)
    before = jax.tree.leaves((cache, state))
    loop(tiny, cache, state)
    assert all(leaf.is_deleted() for leaf in before)


def test_own_rule_in_one_jitted_script(tiny, prompts):
    def second_best(logits: jax.Array, state: DecodeState) -> jax.Array:
        return jax.lax.top_k(logits, 2)[1][:, 1].astype(jnp.int32)

    def script(model: CausalLM, cache: Cache, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
        output, cache = prefill(model, cache, tokens, lengths)
        state = init_state(output.logits, max_tokens=9, sample=second_best)
        state, _ = decode_loop(model, cache, state, sample=second_best)
        return state.tokens

    tokens = np.zeros((4, 16), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    lengths = np.array([*map(len, prompts)], np.int32)
    cache = init_cache(tiny.config, 4, MAX_LENGTH, block_size=BLOCK)
    found = jax.jit(script)(tiny, cache, tokens, lengths)

    logits, cache = prefill_prompts(tiny, cache, prompts, chunk_size=16)
    for column in range(9):
        chosen = np.argsort(-np.asarray(logits), axis=-1, kind="stable")[:, 1].astype(np.int32)
        np.testing.assert_array_equal(found[:, column], chosen)
        output, cache = run_step(tiny, cache, chosen, active=np.ones(4, bool))
        logits = output.logits


def with_broken_token(model: CausalLM, token: int, value: float) -> CausalLM:
    """A copy of the model in which the embedding of one token is NaN or infinite."""
    graph, state = nnx.split(model)
    broken = nnx.merge(graph, jax.tree.map(lambda leaf: leaf, state))
    weight = broken.embed_tokens.weight
    weight.set_value(weight.get_value().at[token].set(value))
    return broken


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_logits_that_are_not_finite_end_their_row_alone(tiny, prompts, greedy, value):
    token = next(t for t in prompts[1] if not any(t in row for row in greedy + prompts[2:]))
    assert token not in prompts[0]
    broken = with_broken_token(tiny, token, value)
    state, cache = loop(broken, *begin(broken, prompts))
    assert reasons(state) == [
        FinishReason.NOT_FINITE if row == 1 else FinishReason.LENGTH for row in range(4)
    ]
    assert outputs(state) == [[] if row == 1 else greedy[row] for row in range(4)]
    assert not cache.overflow.any()
    with pytest.raises(FloatingPointError, match=r"rows \[1\]: the model gave NaN or infinite"):
        next(stream(broken, *begin(broken, prompts)))


def test_a_row_may_break_in_the_middle(tiny, prompts, greedy):
    """The token that row 2 takes at some step is broken; rows that never meet it go on."""
    met = [token for token in greedy[2] if token not in prompts[2]]
    token = next(t for t in met if not any(t in text for text in prompts))
    broken = with_broken_token(tiny, token, np.nan)
    state, _ = loop(broken, *begin(broken, prompts))
    for found, tokens, reason in zip(outputs(state), greedy, reasons(state), strict=True):
        breaks = token in tokens[:-1]
        assert found == (tokens[: tokens.index(token) + 1] if breaks else tokens)
        assert reason == (FinishReason.NOT_FINITE if breaks else FinishReason.LENGTH)
    assert reasons(state)[2] == FinishReason.NOT_FINITE


def test_a_row_without_room_ends_and_the_stream_says_so(tiny, prompts, greedy):
    state, cache = loop(tiny, *begin(tiny, prompts, max_tokens=CAPACITY))
    assert reasons(state) == [*[FinishReason.LENGTH] * 3, FinishReason.CACHE_FULL]
    assert state.count.tolist() == [64, 64, 64, 57]
    assert [row[:50] for row in outputs(state)] == greedy
    assert cache.overflow.tolist() == [False, False, False, True]
    with pytest.raises(CacheFullError) as caught:
        list(stream(tiny, *begin(tiny, prompts, max_tokens=CAPACITY)))
    message = str(caught.value)
    assert "rows [3] found no free block; lengths are [" in message
    assert "3 tokens a block and 96 blocks in the pool; use a larger max_length" in message


def test_a_row_that_ran_out_in_prefill_gives_no_token(tiny, prompts):
    cache = init_cache(tiny.config, 4, MAX_LENGTH, block_size=BLOCK)
    _, state = begin(tiny, prompts)
    flags = jnp.arange(4) == 2
    cache = dataclasses.replace(cache, blocks=dataclasses.replace(cache.blocks, overflow=flags))
    output, cache = run_step(tiny, cache, state.last, active=np.ones(4, bool))
    state = jit_start(
        output.logits,
        max_tokens=jnp.full((4,), 3),
        capacity=CAPACITY,
        stop_ids=jnp.asarray([-1], jnp.int32),
        sampling=SamplingParams.stack([GREEDY] * 4),
        in_prompt=np.zeros((4, tiny.config.vocab_size), np.bool_),
    )
    assert state.count.tolist() == [1, 1, 0, 1]
    with pytest.raises(CacheFullError, match=r"rows \[2\] found no free block"):
        next(stream(tiny, cache, state))


@pytest.mark.parametrize("max_tokens", [0, -3, np.array([2, 0])])
def test_no_token_at_all_is_refused(max_tokens):
    with pytest.raises(RequestError, match=r"max_tokens is .* accepted is a whole number from 1"):
        init_state(jnp.zeros((2, 5)), max_tokens=max_tokens)


def test_a_row_ends_when_its_buffer_is_full(tiny, prompts, greedy):
    state, _ = loop(tiny, *begin(tiny, [*prompts[:3], prompts[0]], max_tokens=10**6))
    assert state.count.tolist() == [CAPACITY] * 4
    assert reasons(state) == [FinishReason.LENGTH] * 4
    assert outputs(state)[0][:50] == greedy[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 2.5}, "max_tokens is 2.5"),
        ({"max_tokens": 2, "capacity": 0}, "capacity is 0; accepted"),
        ({"max_tokens": np.array([1, 2, 3])}, r"of shape \(3,\); accepted is one number, or 2"),
        ({"max_tokens": 2, "sampling": SamplingParams.stack([SamplingOptions()])}, "is of 1 rows"),
        ({"max_tokens": 2, "sampling": SamplingParams.stack([SamplingOptions()] * 3)}, "of 3 rows"),
    ],
)
def test_numbers_that_fit_no_row_are_refused(options, message, no_type_checks):
    with pytest.raises(RequestError, match=message):
        init_state(jnp.zeros((2, 5)), **options)


def test_traced_max_tokens_needs_a_capacity():
    with pytest.raises(RequestError, match="give init_state capacity"):
        jax.jit(lambda x, n: init_state(x, max_tokens=n))(jnp.zeros((2, 5)), 3)
    state = jax.jit(lambda x, n: init_state(x, max_tokens=n, capacity=4))(jnp.zeros((2, 5)), 3)
    assert state.max_tokens.tolist() == [3, 3] and state.tokens.shape == (2, 4)


@pytest.mark.parametrize("stacked", [False, True], ids=["for all", "one a row"])
def test_a_repetition_penalty_needs_the_prompt(stacked):
    options = SamplingOptions(repetition_penalty=1.3)
    given = SamplingParams.stack([GREEDY, options]) if stacked else options
    with pytest.raises(RequestError, match="a repetition penalty needs in_prompt"):
        init_state(jnp.zeros((2, 5)), max_tokens=2, sampling=given)
    prompt = np.zeros((2, 5), np.bool_)
    init_state(jnp.zeros((2, 5)), max_tokens=2, sampling=given, in_prompt=prompt)
    plain = SamplingParams.stack([GREEDY] * 2)
    init_state(jnp.zeros((2, 5)), max_tokens=2, sampling=plain)


@pytest.mark.parametrize("compiled", [False, True])
def test_what_a_state_is_made_of_makes_another_one(tiny, prompts, compiled):
    """The loop takes the state's arrays as a donation, not those of the caller."""
    given = {
        "max_tokens": jnp.full((4,), 9, jnp.int32),
        "stop_ids": jnp.asarray([-1], jnp.int32),
        "vocab_size": jnp.asarray(tiny.config.vocab_size, jnp.int32),
        "sampling": SamplingParams.stack(SAMPLED),
        "in_prompt": jnp.zeros((4, tiny.config.vocab_size), jnp.bool_),
    }
    make, found = (jit_start if compiled else init_state), []
    for _ in range(2):
        cache = init_cache(tiny.config, 4, MAX_LENGTH, block_size=BLOCK)
        logits, cache = prefill_prompts(tiny, cache, prompts, chunk_size=16)
        state, _ = loop(tiny, cache, make(logits, capacity=CAPACITY, **given))
        found.append(outputs(state))
        assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(given))
    assert found[0] == found[1]
