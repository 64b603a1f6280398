"""Prompts with the logits of one pass over each, and their entry into a cache piece by piece."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from qwen_jax import CausalLM
from qwen_jax.cache import Cache, KVBlocks, RecurrentState, init_cache, release
from qwen_jax.decode import decode_step
from qwen_jax.decode.prompt import run_prefill
from qwen_jax.model import Routing

BAR = 1e-4  # of the logits' standard deviation

Pieces = Callable[[np.ndarray], np.ndarray]
"""Tokens left of each row -> how many of them to enter now."""

run_step = jax.jit(decode_step, static_argnames="capture", donate_argnames="cache")
run_release = jax.jit(release, donate_argnums=0)


@dataclasses.dataclass(frozen=True)
class Texts:
    """Prompts of several lengths, and the logits [T, V] of each from one pass without a cache."""

    model: CausalLM
    prompts: list[list[int]]
    logits: list[np.ndarray]
    routing: dict[int, Routing] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def lengths(self) -> np.ndarray:
        return np.array([len(prompt) for prompt in self.prompts], np.int32)

    @functools.cached_property
    def std(self) -> float:
        return float(np.concatenate(self.logits).std())

    @functools.cached_property
    def last(self) -> np.ndarray:
        """Logits [B, V] after each prompt."""
        return np.stack([logits[-1] for logits in self.logits])

    def cache(self, rows: int | None = None, **sizes: int) -> Cache:
        """An empty cache with some room behind the longest prompt."""
        rows = len(self.prompts) if rows is None else rows
        return init_cache(self.model.config, rows, int(self.lengths.max()) + 31, **sizes)

    def tokens(self, begin: np.ndarray, count: np.ndarray, width: int, padding: str) -> np.ndarray:
        """Int32 [B, width]: `count` ids of each prompt from `begin` on.

        Padding holds an id that would change everything if it were read.
        """
        tokens = np.full((len(self.prompts), width), 7, np.int32)
        for row, prompt in enumerate(self.prompts):
            first = 0 if padding == "right" else width - count[row]
            piece = prompt[begin[row] : begin[row] + count[row]]
            tokens[row, first : first + count[row]] = piece
        return tokens

    def difference(self, found: np.ndarray | jax.Array, expected: np.ndarray) -> float:
        """Largest difference, relative to the spread of logits; NaN counts as infinite."""
        found = np.asarray(found)
        assert found.shape == expected.shape
        return float(np.nan_to_num(np.abs(found - expected), nan=np.inf).max() / self.std)

    def enter(
        self,
        cache: Cache,
        width: int,
        pieces: Pieces,
        *,
        upto: np.ndarray | None = None,
        padding: str = "right",
    ) -> tuple[float, Cache]:
        """Enters the prompts behind what their rows hold already, `width` columns a call.

        Args:
            cache: holds the beginning of each prompt; donated.
            width: columns of a call.
            pieces: how many tokens of each row a call enters; cut to `width`.
            upto: end of each row's tokens; whole prompts if None.
            padding: side of the padding.

        Returns:
            The largest difference of any entered position's logits, and the cache.
        """
        upto = self.lengths if upto is None else upto
        done = np.maximum(np.asarray(cache.length), 0)
        worst = 0.0
        while (done < upto).any():
            left = np.maximum(upto - done, 0)
            count = np.minimum(np.minimum(pieces(left), left), width).astype(np.int32)
            tokens = self.tokens(done, count, width, padding)
            output, cache = run_prefill(
                self.model, cache, tokens, count, padding=padding, all_logits=True
            )
            for row, logits in enumerate(np.asarray(output.logits)):
                expected = self.logits[row][done[row] : done[row] + count[row]]
                if count[row]:
                    worst = max(worst, self.difference(logits[: count[row]], expected))
            done = done + count
            np.testing.assert_array_equal(cache.length, done)
        return worst, cache

    def step(
        self, cache: Cache, active: np.ndarray | None = None, run: Callable = run_step
    ) -> tuple[np.ndarray, Cache]:
        """Enters the next token of the active rows; their logits [B, V] and the cache."""
        rows = range(len(self.prompts))
        length = np.asarray(cache.length)
        active = length < self.lengths if active is None else active
        tokens = [self.prompts[r][min(length[r], self.lengths[r] - 1)] for r in rows]
        output, cache = run(self.model, cache, np.array(tokens, np.int32), active=active)
        return np.asarray(output.logits), cache


@functools.cache
def random_texts(model: CausalLM, lengths: tuple[int, ...]) -> Texts:
    """Prompts of random ids."""
    random = np.random.default_rng(0)
    shape = (len(lengths), max(lengths))
    tokens = random.integers(0, model.config.vocab_size, shape, np.int32)
    output = model(tokens, np.array(lengths, np.int32))
    return Texts(
        model,
        [row[:length].tolist() for row, length in zip(tokens, lengths, strict=True)],
        [np.asarray(row[:length]) for row, length in zip(output.logits, lengths, strict=True)],
        output.routing,
    )


def ragged(seed: int, most: int) -> Pieces:
    """Each row gets 0 to `most` tokens a call."""
    random = np.random.default_rng(seed)
    return lambda left: random.integers(0, most + 1, left.shape)


def every(count: int) -> Pieces:
    """Each row gets `count` tokens a call."""
    return lambda left: np.full(left.shape, count)


def poisoned(cache: Cache) -> Cache:
    """NaN wherever no sequence lives: free blocks, the scratch block, states of empty rows."""
    held = np.asarray(cache.blocks.references) > 0
    held[0] = False
    occupied = np.asarray(cache.length) > 0

    def layer(entry: KVBlocks | RecurrentState) -> KVBlocks | RecurrentState:
        keep = held if isinstance(entry, KVBlocks) else occupied

        def poison(array: jax.Array) -> jax.Array:
            mask = keep.reshape(-1, *[1] * (array.ndim - 1))
            return jnp.asarray(np.where(mask, array, np.float32(np.nan)))

        return jax.tree.map(poison, entry)

    return dataclasses.replace(cache, layers=tuple(map(layer, cache.layers)))


def shuffled(cache: Cache, seed: int) -> Cache:
    """An empty cache that hands its blocks out in random order."""
    free = np.asarray(cache.blocks.free).copy()
    count = int(cache.blocks.num_free)
    free[:count] = np.random.default_rng(seed).permutation(free[:count])
    blocks = dataclasses.replace(cache.blocks, free=jnp.asarray(free))
    return dataclasses.replace(cache, blocks=blocks)
