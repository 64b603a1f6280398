"""Blocks at the borders: full pools, shared blocks, overflow, sizes, and what may never be written.

Each operation of a `checked` cache is compared with a naive model; the tests here add what is worth
stating apart. Random operations are in test_random_operations.py.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen_jax.cache import allocate, fork, init_cache, release
from qwen_jax.config import QwenConfig
from qwen_jax.errors import RequestError


@pytest.fixture
def pool_of(checked):
    """Makes a cache of four rows and a given number of blocks of 4 tokens."""

    def make(blocks: int):
        cache = checked(5, 48, 4, 12)  # one size, hence one compilation: a fifth row holds the rest
        cache.write(0, 0, 0, 0, 4 * (12 - blocks))
        return cache

    return make


def test_three_rows_cross_a_border_of_an_exactly_full_pool(pool_of):
    cache = pool_of(5)
    cache.write(4, 4, 4, 5)
    assert cache.num_free == 0
    cache.write(1, 1, 1, 1)
    assert cache.overflow[:4] == [True, True, True, False]
    cache.write(1, 0, 0, 1)  # the flag holds, though no token comes
    assert cache.overflow[:4] == [True, True, True, False]
    cache.release(0)
    cache.write(3, 1, 0, 0)
    assert cache.overflow[:4] == [False, True, True, False]
    cache.release(1, 2)
    assert cache.overflow[:4] == [False] * 4


def test_last_free_block_goes_to_the_first_row_that_needs_one(pool_of):
    cache = pool_of(5)
    cache.write(4, 4, 3, 4)
    cache.write(0, 1, 1, 1)
    assert cache.overflow[:4] == [False, False, False, True]


def test_row_gets_all_it_needs_or_nothing(pool_of):
    cache = pool_of(5)
    cache.write(4, 4, 4, 0)
    cache.write(0, 0, 0, 9)
    assert cache.overflow[:4] == [False, False, False, True]
    assert cache.num_free == 2
    cache.write(1, 1, 1, 0)
    assert cache.overflow[:4] == [False, False, True, True]


def test_row_at_the_end_of_its_table_overflows_while_blocks_are_free(checked):
    cache = checked(4, 12, 4, 6)
    cache.write(8)
    cache.write(4)
    assert cache.overflow == [False] * 4
    cache.write(1, 1)
    assert cache.overflow == [True, False, False, False]
    assert cache.num_free == 2


def test_fork_shares_full_blocks_and_copies_the_partial_one(pool_of):
    cache = pool_of(8)
    cache.write(5, 5, 0, 0)
    cache.write(4, 0, 0, 0)
    assert cache.num_free == 3
    cache.fork(0, 1, 0, 0)
    assert cache.num_free == 1
    cache.write(1, 0, 2, 3)  # each in its own copy
    assert cache.overflow[:4] == [False] * 4
    cache.release(0)  # the full blocks are still held
    assert cache.num_free == 2
    cache.release(2)
    cache.release(2)
    cache.release(3)
    assert cache.num_free == 6
    cache.release(0, 1, 2, 3)
    assert cache.num_free == 8


def test_fork_at_a_border_takes_no_block(pool_of):
    cache = pool_of(2)
    cache.write(4, 4, 0, 0)
    cache.fork(0, 1, 0, 1)
    assert cache.num_free == 0
    assert cache.overflow[:4] == [False] * 4
    cache.write(1, 0, 0, 0)
    assert cache.overflow[:4] == [True, False, False, False]


def test_rows_swap_in_a_full_pool(pool_of):
    cache = pool_of(4)
    cache.write(5, 3, 0, 2)
    assert cache.num_free == 0
    cache.fork(1, 0, 2, 3)
    assert cache.overflow[:4] == [False] * 4
    cache.fork(3, 0, 1, 2)
    assert cache.overflow[:4] == [False] * 4


def test_chain_of_forks_reads_what_rows_were_before(pool_of):
    cache = pool_of(12)
    cache.write(5, 2, 4, 1)
    cache.fork(0, 0, 1, 2)
    assert np.asarray(cache.cache.length)[:4].tolist() == [5, 5, 2, 4]
    cache.fork(0, 0, 1, 1)
    cache.fork(0, 0, 0, 3)
    cache.write(3, 3, 3, 3)
    cache.release(0, 1, 2, 3)
    assert cache.num_free == 12


def test_fork_without_a_free_block_leaves_the_row_empty_and_flagged(pool_of):
    cache = pool_of(4)
    cache.write(5, 5, 0, 0)
    cache.fork(0, 1, 0, 3)
    assert cache.overflow[:4] == [False, False, True, False]
    cache.fork(0, 0, 2, 0)  # row 1's own blocks are freed for its copy, row 3 finds the second
    assert cache.overflow[:4] == [False, False, True, False]
    cache.fork(0, 1, 0, 0)
    assert cache.overflow[:4] == [False, False, False, True]


def test_fork_of_a_flagged_row_is_flagged(checked):
    cache = checked(4, 12, 4, 6)
    cache.write(5)
    cache.write(8)
    cache.fork(0, 0)
    assert cache.overflow == [True, True, False, False]


def test_fork_from_no_row_changes_nothing(pool_of):
    cache = pool_of(5)
    cache.write(5, 3, 0, 1)
    before = jax.device_get(cache.cache)
    cache.fork(-1, 5, 2**31 - 1, -(2**31))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(cache.cache), before)


def test_forked_row_does_not_get_blocks_reserved_for_its_source(config):
    @jax.jit
    def reserve_and_fork(cache):
        blocks = allocate(cache.blocks, jnp.array([9, 0], jnp.int32), cache.block_size)
        forked = fork(dataclasses.replace(cache, blocks=blocks), jnp.zeros(2, jnp.int32))
        return forked.blocks, release(forked, jnp.array([True, False])).blocks

    forked, emptied = reserve_and_fork(init_cache(config, 2, 16, block_size=4))
    assert np.count_nonzero(forked.table, axis=1).tolist() == [3, 0]
    assert int(forked.num_free) == 8 - 3
    assert int(emptied.num_free) == 8


def test_more_tokens_than_an_integer_holds_overflow(config):
    blocks = init_cache(config, 2, 16, block_size=4).blocks
    blocks = dataclasses.replace(blocks, length=jnp.array([3, 3], jnp.int32))
    run = jax.jit(allocate, static_argnums=2)
    after = run(blocks, jnp.array([2**31 - 1, 1], jnp.int32), 4)
    assert np.asarray(after.overflow).tolist() == [True, False]
    assert int(after.num_free) == 7


def test_operations_write_to_the_donated_cache_and_copy_no_pool(optimised, config, operations):
    # In float32, as XLA for CPUs before JAX 0.12 widens a bfloat16 scatter to a float32 pool.
    cache = init_cache(config, 4, 4096)
    pool = cache.layers[1].key.nbytes
    arguments = {
        "write": (np.zeros((4, 3), np.float32), np.ones(4, np.int32)),
        "release": (np.ones(4, bool),),
        "fork": (np.zeros(4, np.int32),),
    }
    for name, operation in operations.items():
        memory = operation.lower(cache, *arguments[name]).compile().memory_analysis()
        assert memory.alias_size_in_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(cache))
        assert memory.temp_size_in_bytes < pool / 8, name


def test_cache_is_carried_through_loops(config, operations):
    cache = init_cache(config, 2, 6, block_size=4, num_blocks=3)

    def step(cache, token):
        tokens = jnp.full((2, 1), token)
        return operations["write"](cache, tokens, jnp.ones(2, jnp.int32)), cache.overflow

    after, overflow = jax.lax.scan(step, cache, jnp.arange(1.0, 8.0))
    assert np.asarray(after.length).tolist() == [7, 4]
    assert np.argmax(np.asarray(overflow), axis=0).tolist() == [0, 5]
    held = np.asarray(after.layers[1].key)[np.asarray(after.blocks.table), 0, :, 0]
    np.testing.assert_array_equal(held[0].reshape(-1)[:7], np.arange(1.0, 8.0))
    np.testing.assert_array_equal(held[1].reshape(-1)[:4], np.arange(1.0, 5.0))


def test_types_do_not_drift_where_x64_is_on(config):
    cache = init_cache(config, 2, 8, block_size=4)

    def every_operation(cache):
        cache = dataclasses.replace(
            cache, blocks=allocate(cache.blocks, jnp.ones(2, jnp.int32), cache.block_size)
        )
        cache = fork(cache, jnp.zeros(2, jnp.int32))
        return release(cache, jnp.zeros(2, jnp.bool_))

    with jax.enable_x64(True):
        after = jax.eval_shape(every_operation, cache)
    before = jax.eval_shape(lambda cache: cache, cache)
    assert jax.tree.leaves(after) == jax.tree.leaves(before)


def test_cache_has_room_for_every_row_unless_told_otherwise(config):
    for dtype in ("float32", "bfloat16"):
        cache = init_cache(dataclasses.replace(config, dtype=dtype), 3, 100)
        recurrent, kv = cache.layers
        assert cache.block_size == 64
        assert cache.blocks.table.shape == (3, 2)
        assert kv.key.shape == kv.value.shape == (3 * 2 + 1, 2, 64, 8)
        assert kv.key.dtype == kv.value.dtype == recurrent.conv.dtype == jnp.dtype(dtype)
        assert recurrent.delta.dtype == jnp.float32
    cache = init_cache(dataclasses.replace(config, mamba_ssm_dtype="bfloat16"), 3, 100)
    assert cache.layers[0].delta.dtype == jnp.bfloat16
    cache = init_cache(config, 3, 100, block_size=128, num_blocks=2)
    assert cache.blocks.table.shape == (3, 1)
    assert cache.layers[1].key.shape == (3, 2, 128, 8)
    assert int(cache.blocks.num_free) == 2


@pytest.mark.parametrize("size", [0, -1])
@pytest.mark.parametrize("name", ["batch_size", "max_length", "block_size", "num_blocks"])
def test_sizes_below_one_are_refused_by_name(config, name, size):
    sizes = {"batch_size": 2, "max_length": 8, name: size}
    with pytest.raises(RequestError, match=rf"{name} is {size}; accepted is .* from 1 on"):
        init_cache(config, **sizes)


@pytest.mark.parametrize("rows", [np.array([1]), np.array([True]), np.arange(3)])
def test_release_refuses_what_is_no_mask_of_its_rows(no_type_checks, rows):
    cache = init_cache(QwenConfig.preset("qwen3.5-0.8b"), 3, 8, block_size=4)
    with pytest.raises(RequestError, match="bool mask"):
        release(cache, jnp.asarray(rows))


def test_fork_refuses_a_source_of_another_length():
    cache = init_cache(QwenConfig.preset("qwen3.5-0.8b"), 3, 8, block_size=4)
    with pytest.raises(RequestError, match=r"source has shape \(1,\)"):
        fork(cache, jnp.array([2], jnp.int32))
