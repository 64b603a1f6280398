"""Prefill and decode steps over a cache give what one pass without a cache gives."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.parity import Expected
from qwen_jax import CausalLM
from qwen_jax.decode import prefill_prompts
from qwen_jax.model import ModelOutput
from qwen_jax.text import Tokenizer
from tests.qwen_jax.decode.texts import BAR, Texts, every, ragged, random_texts, shuffled


@pytest.fixture(scope="module")
def real(
    demo: tuple[CausalLM, Tokenizer], demo_expected: Expected, demo_output: ModelOutput
) -> Texts:
    """The demo model at lengths 1, 5, 19, 63, 64, 65, 200 and 515."""
    prompts = list(demo_expected.prompts.values())
    assert {1, 63, 64, 65, 200, 515} <= {*map(len, prompts)}
    pairs = zip(demo_output.logits, prompts, strict=True)
    return Texts(demo[0], prompts, [np.asarray(row[: len(prompt)]) for row, prompt in pairs])


@pytest.mark.parametrize(
    "pieces", [every(64), every(37), ragged(1, 70)], ids=["64", "37", "ragged"]
)
def test_prefill_in_any_chunking_equals_one_pass(real, pieces):
    worst, cache = real.enter(real.cache(), 64, pieces)
    assert worst <= BAR
    np.testing.assert_array_equal(cache.length, real.lengths)


def test_token_by_token_equals_one_pass(real):
    cache, worst = real.cache(), 0.0
    for step in range(real.lengths.max()):
        active = step < real.lengths
        found, cache = real.step(cache)
        expected = np.stack([row[step] for row in real.logits if step < len(row)])
        worst = max(worst, real.difference(found[active], expected))
    assert worst <= BAR
    np.testing.assert_array_equal(cache.length, real.lengths)


def test_prompts_longer_than_a_chunk_equal_one_pass(real):
    logits, cache = prefill_prompts(real.model, real.cache(), real.prompts)
    assert real.difference(logits, real.last) <= BAR
    np.testing.assert_array_equal(cache.length, real.lengths)


@pytest.fixture(scope="module")
def small(tiny: CausalLM) -> Texts:
    """The tiny model at lengths around the borders of blocks and of the convolution."""
    return random_texts(tiny, [1, 2, 3, 4, 15, 16, 17, 40])


@pytest.mark.usefixtures("fast_compile")
class TestTiny:
    """A random model will do for these."""

    @pytest.mark.parametrize("block_size", [1, 3, 16, 64])
    def test_block_sizes_do_not_matter(self, small, block_size):
        worst, _ = small.enter(small.cache(block_size=block_size), 16, every(11))
        assert worst <= BAR

    @pytest.mark.parametrize("padding", ["right", "left"])
    @pytest.mark.parametrize("seed", [1, 2, 3])
    def test_ragged_pieces_padded_on_either_side(self, small, padding, seed):
        cache = small.cache(block_size=3)
        worst, _ = small.enter(cache, 16, ragged(seed, 16), padding=padding)
        assert worst <= BAR

    @pytest.mark.parametrize("seed", [1, 2, 3])
    def test_blocks_may_lie_anywhere_in_the_pool(self, small, seed):
        cache = shuffled(small.cache(block_size=3), seed)
        worst, _ = small.enter(cache, 16, ragged(seed, 16))
        assert worst <= BAR

    def test_prefill_goes_on_after_decode_after_prefill(self, small):
        _, cache = small.enter(
            small.cache(block_size=3), 16, every(2), upto=np.minimum(small.lengths, 2)
        )
        for _ in range(3):
            found, cache = small.step(cache)
            for row in np.flatnonzero(small.lengths > 4):
                expected = small.logits[row][int(cache.length[row]) - 1]
                assert small.difference(found[row], expected) <= BAR
        worst, cache = small.enter(cache, 16, every(16))
        assert worst <= BAR
        np.testing.assert_array_equal(cache.length, small.lengths)

    def test_a_row_equals_the_same_row_alone(self, small):
        together, _ = prefill_prompts(small.model, small.cache(block_size=3), small.prompts)
        assert small.difference(together, small.last) <= BAR
        for row in (0, 4, 7):
            alone, _ = prefill_prompts(
                small.model, small.cache(1, block_size=3), small.prompts[row : row + 1]
            )
            assert small.difference(alone[0], np.asarray(together[row])) <= BAR

    def test_prompts_may_come_in_several_calls(self, small):
        cut = [len(prompt) // 2 for prompt in small.prompts[1:]]
        one = slice(1, None)
        cache = small.cache(7, block_size=3)
        pairs = list(zip(small.prompts[one], cut, strict=True))
        _, cache = prefill_prompts(small.model, cache, [p[:n] for p, n in pairs])
        found, cache = prefill_prompts(small.model, cache, [p[n:] for p, n in pairs], chunk_size=9)
        assert small.difference(found, small.last[one]) <= BAR
        np.testing.assert_array_equal(cache.length, small.lengths[one])
