"""Prefill and decode steps over a cache give what one pass without a cache gives."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.parity import Expected
from qwen_jax import CausalLM
from qwen_jax.cache import Cache, KVBlocks, RecurrentState, init_cache, release
from qwen_jax.decode import decode_step, prefill, prefill_prompts
from qwen_jax.decode.prompt import run_prefill
from qwen_jax.errors import CacheFullError, RequestError
from qwen_jax.model import ModelOutput
from qwen_jax.text import Tokenizer

BAR = 1e-4  # of the logits' standard deviation

run_step = jax.jit(decode_step, static_argnames="capture", donate_argnames="cache")
run_release = jax.jit(release, donate_argnums=0)


@dataclasses.dataclass(frozen=True)
class Texts:
    """Prompts of several lengths, and the logits [T, V] of each from one pass without a cache."""

    model: CausalLM
    prompts: list[list[int]]
    logits: list[np.ndarray]

    @functools.cached_property
    def lengths(self) -> np.ndarray:
        return np.array([len(prompt) for prompt in self.prompts], np.int32)

    @functools.cached_property
    def std(self) -> float:
        return float(np.concatenate(self.logits).std())

    def last(self) -> np.ndarray:
        """Logits after each prompt."""
        return np.stack([logits[-1] for logits in self.logits])

    def difference(self, found: np.ndarray, expected: np.ndarray) -> float:
        """Largest difference, relative to the spread of logits; NaN counts as infinite."""
        found, expected = np.asarray(found), np.asarray(expected)
        assert found.shape == expected.shape
        return float(np.nan_to_num(np.abs(found - expected), nan=np.inf).max() / self.std)

    def cache(self, rows: int | None = None, **sizes: int) -> Cache:
        rows = len(self.prompts) if rows is None else rows
        return init_cache(self.model.config, rows, int(self.lengths.max()) + 8, **sizes)


@pytest.fixture(scope="module")
def real(
    demo: tuple[CausalLM, Tokenizer], demo_expected: Expected, demo_output: ModelOutput
) -> Texts:
    """The demo model at lengths 1, 5, 19, 63, 64, 65, 200 and 515."""
    prompts = list(demo_expected.prompts.values())
    assert {1, 63, 64, 65, 200, 515} <= {*map(len, prompts)}
    logits = [
        np.asarray(row[: len(prompt)])
        for row, prompt in zip(demo_output.logits, prompts, strict=True)
    ]
    return Texts(demo[0], prompts, logits)


@pytest.fixture(scope="module")
def small(tiny: CausalLM) -> Texts:
    """The tiny model at lengths around the blocks and the convolution."""
    return texts(tiny, [1, 2, 3, 4, 15, 16, 17, 40])


def texts(model: CausalLM, lengths: Sequence[int], seed: int = 0) -> Texts:
    """Random prompts."""
    random = np.random.default_rng(seed)
    tokens = random.integers(0, model.config.vocab_size, (len(lengths), max(lengths)), np.int32)
    output = model(tokens, np.array(lengths, np.int32), capture="none")
    rows = list(zip(tokens, np.asarray(output.logits), lengths, strict=True))
    return Texts(model, [row[:n].tolist() for row, _, n in rows], [row[:n] for _, row, n in rows])


Pieces = Callable[[np.ndarray], np.ndarray]


def enter_in_pieces(
    texts: Texts, cache: Cache, width: int, pieces: Pieces, *, padding: str = "right"
) -> tuple[np.ndarray, Cache]:
    """Prompts into the cache, `pieces(left)` tokens of each row a call, in arrays `width` wide.

    Returns the logits of every position, one prompt after the other, and the cache.
    """
    rows, done = len(texts.prompts), np.zeros(len(texts.prompts), np.int32)
    logits: list[list[np.ndarray]] = [[] for _ in range(rows)]
    while (done < texts.lengths).any():
        left = texts.lengths - done
        count = np.minimum(np.minimum(pieces(left), left), width).astype(np.int32)
        # Padding holds tokens that would change everything if they were read.
        tokens = np.full((rows, width), 7, np.int32)
        for row, prompt in enumerate(texts.prompts):
            first = 0 if padding == "right" else width - count[row]
            piece = prompt[done[row] : done[row] + count[row]]
            tokens[row, first : first + count[row]] = piece
        output, cache = run_prefill(
            texts.model, cache, tokens, count, padding=padding, all_logits=True
        )
        for row, found in enumerate(np.asarray(output.logits)):
            logits[row].extend(found[: count[row]])
        done += count
        np.testing.assert_array_equal(cache.length, done)
    return np.concatenate([np.stack(row) for row in logits]), cache


def ragged(seed: int) -> Pieces:
    """Rows get 0 to 70 tokens a call, each its own number."""
    random = np.random.default_rng(seed)
    return lambda left: random.integers(0, 70, left.shape)


@pytest.mark.parametrize("pieces", [lambda left: left * 0 + 64, lambda left: left * 0 + 37, ragged(1)])
def test_prefill_in_any_chunking_equals_one_pass(real, pieces):
    found, cache = enter_in_pieces(real, real.cache(), 64, pieces)
    assert real.difference(found, np.concatenate(real.logits)) <= BAR
    assert not cache.overflow.any()


def test_token_by_token_equals_one_pass(real):
    cache, worst = real.cache(), 0.0
    for step in range(real.lengths.max()):
        active = step < real.lengths
        tokens = np.array([prompt[min(step, len(prompt) - 1)] for prompt in real.prompts], np.int32)
        output, cache = run_step(real.model, cache, tokens, active=active)
        expected = np.stack([row[step] for row in real.logits if step < len(row)])
        worst = max(worst, real.difference(np.asarray(output.logits)[active], expected))
    assert worst <= BAR
    np.testing.assert_array_equal(cache.length, real.lengths)


def test_prompts_longer_than_a_chunk_equal_one_pass(real):
    logits, cache = prefill_prompts(real.model, real.cache(), real.prompts)
    assert real.difference(logits, real.last()) <= BAR
    np.testing.assert_array_equal(cache.length, real.lengths)


@pytest.mark.usefixtures("fast_compile")
class TestSmall:
    """What no trained model is needed for."""

    @pytest.mark.parametrize("block_size", [1, 3, 16, 64])
    def test_block_sizes_do_not_matter(self, small, block_size):
        cache = small.cache(block_size=block_size)
        found, _ = enter_in_pieces(small, cache, 16, lambda left: left * 0 + 11)
        assert small.difference(found, np.concatenate(small.logits)) <= BAR

    @pytest.mark.parametrize("padding", ["right", "left"])
    @pytest.mark.parametrize("seed", [1, 2])
    def test_ragged_pieces_on_either_side(self, small, padding, seed):
        random = np.random.default_rng(seed)
        found, _ = enter_in_pieces(
            small,
            small.cache(block_size=3),
            16,
            lambda left: random.integers(0, 17, left.shape),
            padding=padding,
        )
        assert small.difference(found, np.concatenate(small.logits)) <= BAR

    def test_prefill_after_decode_after_prefill(self, small):
        cache, done = small.cache(block_size=3), np.zeros(len(small.prompts), np.int32)
        for call, count in enumerate((2, 1, 1, 11, 1, 16, 16)):
            taken = np.minimum(count, small.lengths - done).astype(np.int32)
            tokens = np.full((len(done), 16), 7, np.int32)
            for row, prompt in enumerate(small.prompts):
                tokens[row, : taken[row]] = prompt[done[row] : done[row] + taken[row]]
            if count == 1:
                output, cache = run_step(small.model, cache, tokens[:, 0], active=taken > 0)
            else:
                output, cache = run_prefill(small.model, cache, tokens, taken, all_logits=True)
            logits = np.asarray(output.logits).reshape(len(done), -1, small.model.config.vocab_size)
            for row in np.flatnonzero(taken):
                expected = small.logits[row][done[row] : done[row] + taken[row]]
                assert small.difference(logits[row, : taken[row]], expected) <= BAR, (call, row)
            done += taken
        np.testing.assert_array_equal(done, small.lengths)

    def test_a_row_equals_the_same_row_alone(self, small):
        together, _ = prefill_prompts(small.model, small.cache(block_size=3), small.prompts)
        for row in (0, 4, 7):
            alone, _ = prefill_prompts(
                small.model, small.cache(1, block_size=3), [small.prompts[row]], chunk_size=16
            )
            assert small.difference(alone[0], together[row]) <= BAR

    def test_a_released_row_is_as_good_as_new_though_its_memory_is_poisoned(self, small):
        cache = small.cache(block_size=3)
        _, cache = enter_in_pieces(small, cache, 16, lambda left: left)
        cache = poison(run_release(cache, jnp.ones((len(small.prompts),), jnp.bool_)))
        assert int(cache.blocks.num_free) == cache.blocks.free.shape[0] - 1
        found, _ = enter_in_pieces(small, cache, 16, lambda left: left * 0 + 5)
        assert small.difference(found, np.concatenate(small.logits)) <= BAR

    def test_blocks_may_lie_anywhere_in_the_pool(self, small):
        """Rows come and go until the free list is well mixed; a neighbour stays and is not hurt."""
        rows, keep = len(small.prompts), 7
        random = np.random.default_rng(0)
        cache = small.cache(block_size=3)
        for turn in range(4):
            first = 0 if turn == 0 else 5
            found, cache = enter_in_pieces(
                dataclasses.replace(small, prompts=[p[first * (r == keep) :] for r, p in enumerate(small.prompts)])
                if False
                else small,
                cache,
                16,
                lambda left: random.integers(0, 17, left.shape),
            )
            assert small.difference(found, np.concatenate(small.logits)) <= BAR
            cache = run_release(cache, jnp.asarray(np.ones(rows, bool)))
        blocks = np.asarray(cache.blocks.free)
        assert not np.all(np.abs(np.diff(blocks)) <= 1)


def poison(cache: Cache) -> Cache:
    """NaN wherever no sequence lives; the scratch block and free rows included."""
    held = np.asarray(cache.blocks.references) > 0
    held[0] = False
    live = np.asarray(cache.length) > 0

    def layer(entry: KVBlocks | RecurrentState) -> KVBlocks | RecurrentState:
        keep = held if isinstance(entry, KVBlocks) else live

        def poisoned(array: jax.Array) -> jax.Array:
            shape = (-1,) + (1,) * (array.ndim - 1)
            return jnp.where(jnp.asarray(keep).reshape(shape), array, jnp.nan)

        return jax.tree.map(poisoned, entry)

    return dataclasses.replace(cache, layers=tuple(map(layer, cache.layers)))
