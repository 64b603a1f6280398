"""Needles in a long cache: whatever its depth, a query finds the one key that it points at."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.block_attention import block_attention
from pallas_kernels.testing import relative_error

KV_HEADS, GROUP, WIDTH, BLOCK = 2, 8, 256, 64
SAMPLED = 8


@dataclasses.dataclass
class Haystack:
    """One sequence of random keys in blocks that lie in random order."""

    keys: jax.Array
    values: jax.Array
    key_blocks: jax.Array
    value_blocks: jax.Array
    table: jax.Array

    @classmethod
    def of(cls, tokens: int, dtype: str):
        drawn = jax.random.split(jax.random.key(0), 3)
        shape = (tokens // BLOCK, KV_HEADS, BLOCK, WIDTH)
        keys, values = (jax.random.normal(key, shape, jnp.dtype(dtype)) for key in drawn[:2])
        table = 1 + jax.random.permutation(drawn[2], tokens // BLOCK).astype(jnp.int32)

        def pool(blocks: jax.Array) -> jax.Array:
            empty = jnp.full((blocks.shape[0] + 1, *blocks.shape[1:]), jnp.nan, blocks.dtype)
            return empty.at[table].set(blocks)

        return cls(keys, values, pool(keys), pool(values), table[None])

    def attend(self, q, positions, implementation=None):
        arrays = (q, self.key_blocks, self.value_blocks, self.table, positions)
        run = jax.jit(block_attention, static_argnames=("implementation",))
        return np.asarray(run(*arrays, implementation=implementation), np.float64)

    def needles(self, depths: np.ndarray) -> tuple[jax.Array, np.ndarray]:
        """A query for each depth [n, K * G], that points at the key there; and the values there.

        With scores of about 48, 30 at least, against a spread of 3, all but 1e-6 of the weight
        lies on that key.
        """
        at = depths // BLOCK, slice(None), depths % BLOCK
        q = jnp.repeat(3.0 * self.keys[at].astype(jnp.float32), GROUP, axis=1)
        values = np.repeat(np.asarray(self.values[at], np.float64), GROUP, axis=1)
        return q.astype(self.keys.dtype), values


def check(tokens: int, dtype: str, spread: int) -> None:
    haystack = Haystack.of(tokens, dtype)
    bar = 1e-2 if dtype == "bfloat16" else 1e-3
    edges = [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, tokens - BLOCK - 1, tokens - BLOCK, tokens - 1]
    between = np.linspace(0, tokens - 1, spread).astype(int).tolist()
    for depth in sorted({*edges, *between}):
        q, value = haystack.needles(np.asarray([depth]))
        positions = jnp.asarray([[tokens - 1]], jnp.int32)
        found = haystack.attend(q[None], positions)
        assert relative_error(found[0], value) < bar, depth

    # A chunk of queries at the end, each after its own needle; then a few of them in the reference.
    count = tokens // 256
    depths = np.random.default_rng(0).integers(0, tokens - count, count)
    q, values = haystack.needles(depths)
    positions = jnp.arange(tokens - count, tokens, dtype=jnp.int32)[None]
    found = haystack.attend(q[None], positions)
    assert relative_error(found[0], values) < bar
    q = q + jax.random.normal(jax.random.key(1), q.shape, q.dtype)
    found = haystack.attend(q[None], positions)
    sampled = np.linspace(0, count - 1, SAMPLED).astype(int)
    expected = haystack.attend(q[None, sampled], positions[:, sampled], "reference")
    assert relative_error(found[:, sampled], expected) < 2e-2


def test_needles_in_8k_tokens():
    check(8192, "float32", 4)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_needles_in_128k_tokens_on_a_gpu(dtype):
    check(131072, dtype, 17)
