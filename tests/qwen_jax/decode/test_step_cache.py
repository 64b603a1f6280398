"""What steps do to the cache of other rows, and what they say of rows that did not fit."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen_jax import CausalLM, init_cache, prefill, prefill_prompts
from qwen_jax.cache import Cache, KVBlocks
from qwen_jax.decode.prompt import TOKEN_BYTES, default_chunk_size, run_prefill
from qwen_jax.errors import CacheFullError, RequestError
from tests.qwen_jax.decode.texts import (
    BAR,
    Texts,
    every,
    poisoned,
    random_texts,
    run_release,
    run_step,
)

LENGTHS = np.array([2, 4, 16, 41])
ROWS = np.arange(4)
BLOCK = 3


@pytest.fixture
def small(tiny: CausalLM) -> Texts:
    return random_texts(tiny, tuple(LENGTHS.tolist()))


def contents(cache: Cache, row: int) -> list[np.ndarray]:
    """All that the layers hold of a row."""
    table = np.asarray(cache.blocks.table[row])
    used = table[table > 0]
    arrays = []
    for layer in cache.layers:
        rows = used if isinstance(layer, KVBlocks) else row
        arrays += [np.asarray(leaf)[rows] for leaf in jax.tree.leaves(layer)]
    return arrays


def same(before: list[np.ndarray], after: list[np.ndarray]) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(before, after, strict=True))


def all_but_last(small: Texts, spare: int | None = None) -> Cache:
    """A cache with every prompt but for its last token, and so many blocks left (None: plenty)."""
    cache = small.cache(block_size=BLOCK)
    worst, cache = small.enter(cache, 16, every(16), upto=small.lengths - 1)
    assert worst <= BAR
    if spare is None:
        return cache
    # As if others held the rest of the pool.
    blocks = dataclasses.replace(cache.blocks, num_free=jnp.asarray(spare, jnp.int32))
    return dataclasses.replace(cache, blocks=blocks)


def test_released_rows_are_as_good_as_new_and_the_others_as_before(small):
    cache = all_but_last(small)
    for rows in ([1, 3], [0, 2], [0, 1, 2, 3]):
        gone = np.isin(ROWS, rows)
        cache = poisoned(run_release(cache, jnp.asarray(gone)))
        np.testing.assert_array_equal(cache.length, np.where(gone, 0, LENGTHS - 1))
        worst, cache = small.enter(cache, 16, every(5), upto=LENGTHS - 1)
        assert worst <= BAR
    found, cache = small.step(cache)
    assert small.difference(found, small.last) <= BAR


def test_rows_without_tokens_keep_all_they_hold(small):
    cache = all_but_last(small)
    before = [contents(cache, row) for row in ROWS]
    active = np.isin(ROWS, [0, 2])
    found, cache = small.step(cache, active)
    assert small.difference(found[active], small.last[active]) <= BAR
    np.testing.assert_array_equal(cache.length, LENGTHS - ~active)
    assert same(before[1], contents(cache, 1))
    assert same(before[3], contents(cache, 3))


@pytest.mark.parametrize("width", [1, 16])
def test_a_row_that_finds_no_block_takes_nothing_and_the_others_go_on(small, width):
    """With the last token rows 1 and 2 begin a block each, and one is left."""
    cache = all_but_last(small, spare=1)
    before = contents(cache, 2)
    if width == 1:
        found, cache = small.step(cache)
    else:
        one = np.ones(4, np.int32)
        tokens = small.tokens(LENGTHS - 1, one, width, "right")
        output, cache = run_prefill(small.model, cache, tokens, one, all_logits=True)
        found = np.asarray(output.logits)[:, 0]
    full = ROWS == 2
    np.testing.assert_array_equal(cache.overflow, full)
    np.testing.assert_array_equal(cache.length, LENGTHS - full)
    assert small.difference(found[~full], small.last[~full]) <= BAR
    assert np.isnan(found[full]).all()
    assert same(before, contents(cache, 2))


def test_a_flag_stays_until_the_row_is_released(small):
    _, cache = small.step(all_but_last(small, spare=1))
    cache = run_release(cache, jnp.asarray(ROWS == 3))
    found, cache = small.step(cache, ROWS == 2)
    assert np.isnan(found[2]).all()
    with pytest.raises(CacheFullError, match=r"rows \[2\] ran out of blocks before"):
        prefill_prompts(small.model, cache, small.prompts)
    cache = run_release(cache, jnp.asarray(ROWS == 2))
    worst, cache = small.enter(cache, 16, every(16), upto=np.where(ROWS == 3, 30, LENGTHS))
    assert worst <= BAR
    assert not cache.overflow.any()


def test_nothing_is_captured_unless_asked_for(small):
    cache = small.cache(block_size=BLOCK)
    tokens = np.ones((4, 16), np.int32)
    assert run_prefill(small.model, cache, tokens, np.ones(4, np.int32))[0].routing == {}


def test_routing_equals_that_of_one_pass_and_is_empty_at_padding(small):
    count = np.array([0, 2, 9, 16], np.int32)
    tokens = small.tokens(np.zeros(4, np.int32), count, 16, "right")
    cache = small.cache(block_size=BLOCK)
    found = run_prefill(small.model, cache, tokens, count, capture="full")[0].routing
    assert [*found] == [*small.routing] == [0, 1]
    config = small.model.config
    real = np.arange(16) < count[:, None]
    for layer, routing in found.items():
        wanted = jax.tree.map(lambda array: np.asarray(array[:, :16])[real], small.routing[layer])
        ids, weights = np.asarray(routing.ids), np.asarray(routing.weights)
        assert ids.shape == (4, 16, config.num_experts_per_tok)
        assert ids.dtype == np.int32
        np.testing.assert_array_equal(ids[~real], config.num_experts)
        np.testing.assert_array_equal(weights[~real], 0)
        np.testing.assert_array_equal(ids[real], wanted.ids)
        np.testing.assert_allclose(weights[real], wanted.weights, atol=1e-5)
        np.testing.assert_allclose(np.asarray(routing.logits)[real], wanted.logits, atol=1e-4)


def test_a_step_captures_ids_and_weights_without_logits(small):
    cache = small.cache(block_size=BLOCK)
    active = ROWS != 3
    output, _ = run_step(small.model, cache, np.ones(4, np.int32), active=active, capture="ids")
    assert [*output.routing] == [0, 1]
    for routing in output.routing.values():
        assert routing.ids.shape == routing.weights.shape == (4, 1, 2)
        np.testing.assert_array_equal(np.asarray(routing.ids == 6).all((1, 2)), ~active)
        assert routing.logits is None


@pytest.mark.parametrize(
    ("prompts", "options", "error", "message"),
    [
        ([[1], []], {}, RequestError, "prompt 1 is empty; give at least one token"),
        ([[1]], {}, RequestError, "1 prompts for a cache of 2 rows"),
        ([[1], [5, 61]], {}, RequestError, "prompt 1: id 61 is outside .* accepted are 0 to 60"),
        ([[-1], [5]], {}, RequestError, "prompt 0: id -1 is outside"),
        ([[0.5], [5]], {}, RequestError, "prompt 0 holds float64 values"),
        ([[True], [5]], {}, RequestError, "prompt 0 holds bool values"),
        ([[[1], [2, 3]], [5]], {}, RequestError, "prompt 0 is nested"),
        ([[1], [2]], {"chunk_size": 0}, RequestError, "^chunk_size is 0"),
        ([[1], [2]], {"chunk_size": 1.5}, RequestError, "^chunk_size is 1.5"),
        ([[1], [2] * 10], {}, CacheFullError, "prompt 1 has 10 tokens, .* room for 9"),
        ([[1] * 7, [2] * 7], {}, CacheFullError, "need 6 blocks of 3 tokens, .* has 5 free"),
    ],
)
def test_prompts_that_cannot_be_entered_are_refused(
    no_type_checks, tiny, prompts, options, error, message
):
    cache = init_cache(tiny.config, 2, 9, block_size=3, num_blocks=5)
    with pytest.raises(error, match=message):
        prefill_prompts(tiny, cache, prompts, **options)
    assert not cache.length.is_deleted()


def test_prompts_may_fill_their_rows_and_the_pool(tiny):
    cache = init_cache(tiny.config, 2, 9, block_size=3, num_blocks=5)
    _, cache = prefill_prompts(tiny, cache, [[1] * 4, [2] * 4], chunk_size=16)
    _, cache = prefill_prompts(tiny, cache, [[1] * 5, [2] * 2], chunk_size=16)
    assert (cache.length.tolist(), int(cache.blocks.num_free)) == ([9, 6], 0)
    assert not cache.overflow.any()
    with pytest.raises(CacheFullError, match=r"prompt 0 has 1 tokens, .* room for 0"):
        prefill_prompts(tiny, cache, [[1], [2]])


@pytest.mark.parametrize(
    ("rows", "gigabytes", "size"),
    [(1, None, 512), (1, 141, 8192), (8, 141, 1024), (64, 141, 512), (1, 24, 2048), (4, 2, 512)],
)
def test_chunks_follow_the_memory(rows, gigabytes, size):
    memory = None if gigabytes is None else gigabytes * 10**9
    assert default_chunk_size(rows, memory) == size
    if size > 512:
        assert rows * size * TOKEN_BYTES <= memory / 64


@pytest.mark.parametrize("option", ["padding", "capture"])
def test_an_unknown_option_is_refused(no_type_checks, tiny, option):
    cache = init_cache(tiny.config, 1, 9)
    tokens = np.ones((1, 4), np.int32)
    with pytest.raises(RequestError, match=f"{option} is 'both'; accepted are"):
        jax.eval_shape(lambda: prefill(tiny, cache, tokens, jnp.array([4]), **{option: "both"}))


@pytest.mark.parametrize("length", [-1, 5])
def test_an_impossible_length_is_flagged_and_takes_no_token(tiny, length):
    cache = init_cache(tiny.config, 2, 9)
    tokens = np.ones((2, 4), np.int32)
    output, cache = run_prefill(tiny, cache, tokens, np.array([length, 4], np.int32))
    assert np.asarray(cache.length).tolist() == [0, 4]
    assert np.asarray(cache.overflow).tolist() == [True, False]
    assert np.isnan(output.logits[0]).all() and np.isfinite(output.logits[1]).all()


def test_rows_that_are_not_the_caches_are_refused(tiny):
    with pytest.raises(RequestError, match="a cache of 3 rows"):
        prefill(tiny, init_cache(tiny.config, 3, 9), jnp.ones((1, 4), jnp.int32), jnp.array([4]))
