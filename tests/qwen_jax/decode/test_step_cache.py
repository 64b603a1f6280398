"""What steps do to the cache of other rows, and what they say of rows that did not fit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen_jax import CausalLM, init_cache, prefill_prompts
from qwen_jax.cache import Cache, KVBlocks
from qwen_jax.decode.prompt import run_prefill
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

pytestmark = pytest.mark.usefixtures("fast_compile")
LENGTHS = [1, 2, 3, 4, 15, 16, 17, 40]
BLOCK = 3


@pytest.fixture(scope="module")
def small(tiny: CausalLM) -> Texts:
    return random_texts(tiny, LENGTHS)


def blocks_for(tokens: np.ndarray) -> int:
    return int((-(-tokens // BLOCK)).sum())


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


def test_released_rows_are_as_good_as_new_and_the_others_as_before(small):
    short = small.lengths - 1
    _, cache = small.enter(small.cache(block_size=BLOCK), 16, every(16), upto=short)
    for rows in ([1, 4, 7], [0, 2, 3, 5, 6], range(8)):
        gone = np.isin(np.arange(8), rows)
        cache = poisoned(run_release(cache, jnp.asarray(gone)))
        np.testing.assert_array_equal(cache.length, np.where(gone, 0, short))
        worst, cache = small.enter(cache, 16, every(5), upto=short)
        assert worst <= BAR
    found, cache = small.step(cache)
    assert small.difference(found, small.last) <= BAR


def test_rows_without_tokens_keep_all_they_hold(small):
    _, cache = small.enter(small.cache(block_size=BLOCK), 16, every(16), upto=small.lengths - 1)
    before = [contents(cache, row) for row in range(8)]
    _, cache = small.step(cache, active=np.arange(8) % 2 == 0)
    np.testing.assert_array_equal(cache.length, small.lengths - 1 + (np.arange(8) % 2 == 0))
    for row in range(1, 8, 2):
        assert same(before[row], contents(cache, row))


@pytest.mark.parametrize("width", [1, 16])
def test_a_row_that_finds_no_block_takes_nothing_and_the_others_go_on(small, width):
    """At the last token rows 0, 3, 5 and 7 need a block each, and two are left."""
    short = small.lengths - 1
    cache = small.cache(block_size=BLOCK, num_blocks=blocks_for(short) + 2)
    _, cache = small.enter(cache, 16, every(16), upto=short)
    before = [contents(cache, row) for row in range(8)]
    if width == 1:
        found, cache = small.step(cache)
    else:
        tokens = small.tokens(short, np.ones(8, np.int32), width, "right")
        output, cache = run_prefill(small.model, cache, tokens, np.ones(8, np.int32))
        found = np.asarray(output.logits)
    full = np.isin(np.arange(8), [5, 7])
    np.testing.assert_array_equal(cache.overflow, full)
    np.testing.assert_array_equal(cache.length, np.where(full, short, small.lengths))
    assert small.difference(found[~full], small.last[~full]) <= BAR
    assert np.isnan(found[full]).all()
    assert all(same(before[row], contents(cache, row)) for row in (5, 7))


def test_a_flag_stays_until_the_row_is_released(small):
    short = small.lengths - 1
    cache = small.cache(block_size=BLOCK, num_blocks=blocks_for(short) + 2)
    _, cache = small.enter(cache, 16, every(16), upto=short)
    _, cache = small.step(cache)
    cache = run_release(cache, jnp.arange(8) == 4)
    found, cache = small.step(cache, active=np.isin(np.arange(8), [5, 7]))
    assert np.isnan(found[[5, 7]]).all()
    with pytest.raises(CacheFullError, match=r"rows \[5, 7\] ran out of blocks before"):
        prefill_prompts(small.model, cache, small.prompts)
    cache = run_release(cache, jnp.isin(jnp.arange(8), jnp.asarray([4, 5, 7])))
    worst, cache = small.enter(cache, 16, every(16), upto=np.where(np.arange(8) == 7, 0, LENGTHS))
    assert worst <= BAR
    assert not cache.overflow.any()


@pytest.mark.parametrize("capture", ["none", "ids", "full"])
def test_capture_returns_what_was_asked_for_and_nothing_at_padding(small, capture):
    count = np.array([0, 2, 1, 4, 9, 16, 16, 16], np.int32)
    tokens = small.tokens(np.zeros(8, np.int32), count, 16, "right")
    cache = small.cache(block_size=BLOCK)
    routing = run_prefill(small.model, cache, tokens, count, capture=capture)[0].routing
    if capture == "none":
        assert routing == {}
        return
    config = small.model.config
    padded = np.zeros((8, 40), np.int32)
    padded[:, :16] = tokens
    expected = small.model(padded, np.maximum(count, 1)).routing
    real = np.arange(16) < count[:, None]
    assert [*routing] == [*expected] == [0, 1]
    for layer, found in routing.items():
        assert found.ids.shape == (8, 16, config.num_experts_per_tok)
        assert found.ids.dtype == np.int32
        np.testing.assert_array_equal(np.asarray(found.ids)[~real], config.num_experts)
        np.testing.assert_array_equal(np.asarray(found.weights)[~real], 0)
        wanted = expected[layer]
        np.testing.assert_array_equal(found.ids[real], wanted.ids[:, :16][real])
        np.testing.assert_allclose(found.weights[real], wanted.weights[:, :16][real], atol=1e-5)
        assert (found.logits is None) == (capture == "ids")
        if found.logits is not None:
            np.testing.assert_allclose(found.logits[real], wanted.logits[:, :16][real], atol=1e-4)


def test_a_step_captures_too(small):
    cache = small.cache(block_size=BLOCK)
    active = np.arange(8) != 3
    output, _ = run_step(small.model, cache, np.ones(8, np.int32), active=active, capture="ids")
    for routing in output.routing.values():
        assert routing.ids.shape == (8, 1, 2)
        np.testing.assert_array_equal(np.asarray(routing.ids == 6).all((1, 2)), ~active)


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
        ([[1], [2]], {"chunk_size": 0}, RequestError, "prefill_chunk_size is 0"),
        ([[1], [2] * 10], {}, CacheFullError, "prompt 1 has 10 tokens, .* room for 9"),
        ([[1] * 7, [2] * 7], {}, CacheFullError, "need 6 blocks of 3 tokens, .* has 5 free"),
    ],
)
def test_prompts_that_cannot_be_entered_are_refused(tiny, prompts, options, error, message):
    cache = init_cache(tiny.config, 2, 9, block_size=3, num_blocks=5)
    with pytest.raises(error, match=message):
        prefill_prompts(tiny, cache, prompts, **options)
    assert not cache.length.is_deleted()
