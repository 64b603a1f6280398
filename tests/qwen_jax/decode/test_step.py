"""Prefill and decode steps over a cache give what one pass without a cache gives."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from benchmarks.parity import Expected
from qwen_jax import CausalLM
from qwen_jax.decode import decode_step, prefill_prompts
from qwen_jax.model import ModelOutput
from qwen_jax.text import Tokenizer
from tests.compiling import USUAL
from tests.qwen_jax.decode.texts import BAR, Texts, every, ragged, random_texts, shuffled


@pytest.fixture(scope="module")
def real(
    demo: tuple[CausalLM, Tokenizer], demo_expected: Expected, demo_output: ModelOutput
) -> Texts:
    """The demo model at lengths 1, 63, 64, 65, 200 and 515."""
    names = [*demo_expected.prompts]
    rows = [names.index(name) for name in ("one_token", "n63", "n64", "n65", "n200", "n515")]
    prompts = [demo_expected.prompts[names[row]] for row in rows]
    assert [len(prompt) for prompt in prompts] == [1, 63, 64, 65, 200, 515]
    pairs = zip(rows, prompts, strict=True)
    return Texts(
        demo[0], prompts, [np.asarray(demo_output.logits[row, : len(p)]) for row, p in pairs]
    )


@pytest.mark.parametrize("pieces", [every(64), ragged(1, 120)], ids=["64", "ragged"])
def test_prefill_in_any_chunking_equals_one_pass(real, pieces):
    worst, cache = real.enter(real.cache(), 64, pieces)
    assert worst <= BAR
    np.testing.assert_array_equal(cache.length, real.lengths)


def test_token_by_token_equals_one_pass(optimised, real):
    run = jax.jit(decode_step, donate_argnames="cache", compiler_options=USUAL)
    cache, worst = real.cache(), 0.0
    for step in range(real.lengths.max()):
        active = step < real.lengths
        found, cache = real.step(cache, run=run)
        expected = np.stack([row[step] for row in real.logits if step < len(row)])
        worst = max(worst, real.difference(found[active], expected))
    assert worst <= BAR
    np.testing.assert_array_equal(cache.length, real.lengths)


def test_a_long_prompt_at_once_equals_one_pass_without_cache(real):
    length = len(real.prompts[-1])
    logits, cache = prefill_prompts(real.model, real.cache(1), real.prompts[-1:], chunk_size=length)
    assert real.difference(logits, real.last[-1:]) <= BAR
    np.testing.assert_array_equal(cache.length, length)


@pytest.fixture
def small(tiny: CausalLM) -> Texts:
    """The tiny model at lengths around the borders of blocks and of the convolution."""
    return random_texts(tiny, (2, 4, 16, 41))


@pytest.mark.parametrize("block_size", [1, 3, 16, 64])
def test_block_sizes_do_not_matter(small, block_size):
    worst, _ = small.enter(small.cache(block_size=block_size), 16, every(11))
    assert worst <= BAR


@pytest.mark.parametrize("padding", ["right", "left"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_ragged_pieces_padded_on_either_side(small, padding, seed):
    cache = small.cache(block_size=3)
    worst, _ = small.enter(cache, 16, ragged(seed, 16), padding=padding)
    assert worst <= BAR


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_blocks_may_lie_anywhere_in_the_pool(small, seed):
    cache = shuffled(small.cache(block_size=3), seed)
    worst, _ = small.enter(cache, 16, ragged(seed, 16))
    assert worst <= BAR


def test_prefill_goes_on_after_decode_after_prefill(small):
    one = np.ones_like(small.lengths)
    worst, cache = small.enter(small.cache(block_size=3), 16, every(1), upto=one)
    for length in (2, 3, 4):
        found, cache = small.step(cache)
        for row in np.flatnonzero(small.lengths >= length):
            worst = max(worst, small.difference(found[row], small.logits[row][length - 1]))
    rest, cache = small.enter(cache, 16, every(16))
    assert max(worst, rest) <= BAR
    np.testing.assert_array_equal(cache.length, small.lengths)


def test_a_row_equals_the_same_row_alone(small):
    together, _ = prefill_prompts(
        small.model, small.cache(block_size=3), small.prompts, chunk_size=16
    )
    assert small.difference(together, small.last) <= BAR
    for row in range(4):
        alone, _ = prefill_prompts(
            small.model, small.cache(1, block_size=3), small.prompts[row : row + 1], chunk_size=16
        )
        assert small.difference(alone[0], np.asarray(together[row])) <= BAR


def test_prompts_may_come_in_several_calls(small):
    cache = small.cache(block_size=3)
    cut = [(prompt[: len(prompt) // 2], prompt[len(prompt) // 2 :]) for prompt in small.prompts]
    for prompts in zip(*cut, strict=True):
        found, cache = prefill_prompts(small.model, cache, prompts, chunk_size=16)
    assert small.difference(found, small.last) <= BAR
    np.testing.assert_array_equal(cache.length, small.lengths)
