"""A cache run in step with a naive model of it, and compared with it after every operation."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention_inputs import attention_inputs
from qwen_jax.cache import Cache, KVBlocks, RecurrentState, allocate, fork, init_cache
from qwen_jax.cache import release as release_rows
from qwen_jax.config import QwenConfig

TINY = {
    "model_type": "qwen3_5_text",
    "vocab_size": 8,
    "hidden_size": 4,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 4,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 1,
    "linear_key_head_dim": 2,
    "linear_value_head_dim": 2,
    "dtype": "float32",
}

TRACED: collections.Counter[str] = collections.Counter()


def write(cache: Cache, tokens: jax.Array, lengths: jax.Array) -> Cache:
    """Does to a cache what a forward pass does, with the tokens [B, T] themselves as content.

    A key is its token, a value its negative, a recurrent state the sum of the tokens so far.
    """
    TRACED["write"] += 1
    blocks = allocate(cache.blocks, lengths, cache.block_size)
    lengths = jnp.where(blocks.overflow, 0, lengths)
    step = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
    real = step < lengths[:, None]
    positions = jnp.where(real, blocks.length[:, None] + step, -1)
    recurrent, kv = cache.layers
    assert isinstance(recurrent, RecurrentState) and isinstance(kv, KVBlocks)
    _, kv_heads, _, width = kv.key.shape
    key = jnp.broadcast_to(tokens[:, :, None, None], (*tokens.shape, kv_heads, width))
    kv = append(kv, blocks.table, positions, key, -key)
    new = jnp.sum(jnp.where(real, tokens, 0.0), axis=1)

    def add(state: jax.Array) -> jax.Array:
        by_row = (-1,) + (1,) * (state.ndim - 1)
        before = jnp.where((blocks.length == 0).reshape(by_row), 0, state)
        after = before + new.astype(state.dtype).reshape(by_row)
        return jnp.where((lengths > 0).reshape(by_row), after, state)

    return dataclasses.replace(
        cache,
        blocks=dataclasses.replace(blocks, length=blocks.length + lengths),
        layers=(RecurrentState(add(recurrent.conv), add(recurrent.delta)), kv),
    )


def append(
    kv: KVBlocks, table: jax.Array, positions: jax.Array, key: jax.Array, value: jax.Array
) -> KVBlocks:
    """Writes keys and values as they are: none is turned."""
    straight = jnp.ones((*positions.shape, 1), jnp.float32)
    pools = (kv.key, kv.value, table, positions)
    new = attention_inputs(key, key, value, straight, 0 * straight, None, None, *pools)
    return KVBlocks(new.key, new.value)


def traced_release(cache: Cache, rows: jax.Array) -> Cache:
    TRACED["release"] += 1
    return release_rows(cache, rows)


def traced_fork(cache: Cache, source: jax.Array) -> Cache:
    TRACED["fork"] += 1
    return fork(cache, source)


RUN = {
    function.__name__: jax.jit(function, donate_argnums=0)
    for function in (write, traced_release, traced_fork)
}


@dataclasses.dataclass(eq=False)
class Block:
    """A block of the naive model; who holds it is found by its identity."""

    tokens: list[int]


class NaiveCache:
    """What the cache promises, in lists."""

    def __init__(self, batch: int, width: int, block_size: int, num_blocks: int):
        self.rows: list[list[Block]] = [[] for _ in range(batch)]
        self.overflow = [False] * batch
        self.width, self.block_size, self.num_blocks = width, block_size, num_blocks

    def tokens(self, row: int) -> list[int]:
        return [token for block in self.rows[row] for token in block.tokens]

    @property
    def num_free(self) -> int:
        return self.num_blocks - len({id(block) for row in self.rows for block in row})

    def write(self, new: Sequence[Sequence[int]]) -> None:
        free, wanted = self.num_free, 0
        for row, tokens in enumerate(new):
            if self.overflow[row]:
                continue
            blocks = self.rows[row]
            total = len(self.tokens(row)) + len(tokens)
            need = -(-total // self.block_size) - len(blocks)
            wanted += need if total <= self.width * self.block_size else 0
            if total > self.width * self.block_size or (need > 0 and wanted > free):
                self.overflow[row] = True
                continue
            for token in tokens:
                if not blocks or len(blocks[-1].tokens) == self.block_size:
                    blocks.append(Block([]))
                blocks[-1].tokens.append(token)

    def release(self, rows: Sequence[int]) -> None:
        for row in rows:
            self.rows[row], self.overflow[row] = [], False

    def fork(self, source: Sequence[int]) -> None:
        held, flags = list(self.rows), list(self.overflow)
        changed = [row for row, of in enumerate(source) if 0 <= of < len(source) and of != row]
        for row in changed:
            blocks = held[source[row]]
            self.rows[row] = [block for block in blocks if len(block.tokens) == self.block_size]
            self.overflow[row] = flags[source[row]]
        free = self.num_free
        for row in changed:
            last = held[source[row]][-1:]
            if last and len(last[0].tokens) < self.block_size:
                free -= 1
                self.rows[row].append(Block(list(last[0].tokens)))
                self.overflow[row] |= free < 0
                if free < 0:
                    self.rows[row].clear()


class CheckedCache:
    """The cache and its naive model, compared after each operation."""

    def __init__(
        self, config: QwenConfig, batch: int, max_length: int, block_size: int, num_blocks: int
    ):
        self.cache = init_cache(
            config, batch, max_length, block_size=block_size, num_blocks=num_blocks
        )
        width = -(-max_length // block_size)
        self.naive = NaiveCache(batch, width, block_size, num_blocks)
        self.batch, self.max_length, self.written = batch, max_length, 0
        self.check()

    @property
    def num_free(self) -> int:
        return int(self.cache.blocks.num_free)

    @property
    def overflow(self) -> list[bool]:
        return np.asarray(self.cache.overflow).tolist()

    def write(self, *counts: int) -> None:
        """Appends so many new tokens to each row, none to rows that are left out.

        Each token is another number, and padding is NaN.
        """
        tokens = np.full((self.batch, self.max_length), np.nan, np.float32)
        lengths = np.zeros(self.batch, np.int32)
        lengths[: len(counts)] = counts
        new = []
        for row, count in enumerate(lengths.tolist()):
            new.append(list(range(self.written + 1, self.written + count + 1)))
            tokens[row, :count] = new[row]
            self.written += count
        self.naive.write(new)
        self.cache = RUN["write"](self.cache, tokens, lengths)
        self.check()

    def release(self, *rows: int) -> None:
        self.naive.release(rows)
        mask = np.isin(np.arange(self.batch), rows)
        self.cache = RUN["traced_release"](self.cache, mask)
        self.check()

    def fork(self, *source: int) -> None:
        """Makes row b a copy of source[b]; rows that are left out stay as they are."""
        sources = [*source, *range(len(source), self.batch)]
        self.naive.fork(sources)
        self.cache = RUN["traced_fork"](self.cache, np.array(sources, np.int32))
        self.check()

    def check(self) -> None:
        cache = jax.device_get(self.cache)
        blocks = cache.blocks
        assert blocks.overflow.tolist() == self.naive.overflow
        assert blocks.num_free == self.naive.num_free
        self._check_ownership(blocks.table, blocks.references, blocks.free[: blocks.num_free])
        for row in range(self.batch):
            self._check_row(row, cache)

    def _check_ownership(self, table: np.ndarray, references: np.ndarray, free: np.ndarray) -> None:
        """Every block but scratch is either free or held, and counted as often as it is held."""
        held = collections.Counter(table[table != 0].tolist())
        everything = list(range(1, self.naive.num_blocks + 1))
        assert sorted([*free.tolist(), *held]) == everything
        assert references.tolist() == [1] + [held[block] for block in everything]

    def _check_row(self, row: int, cache: Cache) -> None:
        """A row holds its own tokens, in as many blocks as they need, and its own state."""
        table, length = cache.blocks.table[row], int(cache.blocks.length[row])
        tokens, used = self.naive.tokens(row), len(self.naive.rows[row])
        assert length == len(tokens)
        assert (table[:used] > 0).all() and not table[used:].any()
        recurrent, kv = cache.layers
        expected = np.array(tokens)[:, None, None]
        for pool, sign in ((kv.key, 1), (kv.value, -1)):
            by_token = pool[table].swapaxes(1, 2).reshape(-1, pool.shape[1], pool.shape[3])
            assert (by_token[:length] == sign * expected).all()
        if length:
            assert (recurrent.conv[row] == sum(tokens)).all()
            assert (recurrent.delta[row] == sum(tokens)).all()


@pytest.fixture(scope="session")
def config() -> QwenConfig:
    """One linear-attention layer and one attention layer."""
    return QwenConfig.from_hf(TINY)


@pytest.fixture(scope="session")
def checked(config: QwenConfig) -> Callable[..., CheckedCache]:
    """Makes a cache that is compared with the naive model after each operation."""

    def make(batch: int, max_length: int, block_size: int, num_blocks: int) -> CheckedCache:
        return CheckedCache(config, batch, max_length, block_size, num_blocks)

    return make


@pytest.fixture(scope="session")
def operations() -> dict[str, Callable[..., Cache]]:
    """The compiled operations of a checked cache: write, release and fork, each donating it."""
    return {name.removeprefix("traced_"): function for name, function in RUN.items()}


@pytest.fixture(scope="session")
def traced() -> collections.Counter[str]:
    """How often each operation was traced."""
    return TRACED
