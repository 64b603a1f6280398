"""A row's recurrent state counts from its first token on, whatever the row held before."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.delta_rule import gated_delta_rule
from qwen_jax.cache import Cache, RecurrentState, empty_recurrent, init_cache

LONGEST = 6


@pytest.fixture(scope="module")
def rule(config):
    """Runs tokens through one layer; each row counts from its length on."""
    rng = np.random.default_rng(0)
    taps = rng.standard_normal((config.conv_dim, config.linear_conv_kernel_dim))
    heads = config.linear_num_value_heads
    weights = [np.asarray(x, np.float32) for x in (taps, np.zeros(heads), np.zeros(heads))]
    run = jax.jit(gated_delta_rule)

    def step(state: RecurrentState, inputs: np.ndarray, start: list[int], lengths: list[int]):
        gates = inputs[..., :heads]
        conv, delta = state.conv, state.delta
        counts = np.array(start, np.int32), np.array(lengths, np.int32)
        mixed, conv, delta = run(inputs, gates, gates, *weights, conv, delta, *counts)
        return np.asarray(mixed), RecurrentState(conv, delta)

    return step


@pytest.fixture
def inputs(config):
    rng = np.random.default_rng(1)
    return rng.standard_normal((3, LONGEST, config.conv_dim)).astype(np.float32)


def poisoned(state: RecurrentState, *rows: int) -> RecurrentState:
    conv, delta = np.array(state.conv), np.array(state.delta)
    conv[list(rows)], delta[list(rows)] = np.nan, np.nan
    return RecurrentState(jnp.asarray(conv), jnp.asarray(delta))


def row_of(state: RecurrentState, row: int) -> list[np.ndarray]:
    return [np.asarray(state.conv)[row], np.asarray(state.delta)[row]]


@pytest.mark.parametrize("length", range(1, LONGEST + 1))
def test_reused_row_needs_no_clearing(config, rule, inputs, length):
    clean = empty_recurrent(config, 3)
    lengths = [LONGEST, length, 0]
    expected, after_clean = rule(clean, inputs, [0, 0, 0], lengths)
    mixed, after = rule(poisoned(clean, 1), inputs, [0, 0, 0], lengths)
    np.testing.assert_array_equal(mixed[1, :length], expected[1, :length])
    np.testing.assert_array_equal(after.delta, after_clean.delta)

    # Columns of the ring that hold nothing yet are never read, so the next call agrees too.
    start = [LONGEST, length, 0]
    expected, after_clean = rule(after_clean, inputs, start, [1, LONGEST, 2])
    mixed, after = rule(after, inputs, start, [1, LONGEST, 2])
    np.testing.assert_array_equal(mixed[1], expected[1])
    np.testing.assert_array_equal(after.conv, after_clean.conv)
    np.testing.assert_array_equal(after.delta, after_clean.delta)


def test_reused_row_fed_token_by_token_needs_no_clearing(config, rule, inputs):
    clean = empty_recurrent(config, 3)
    dirty = poisoned(clean, 0, 2)
    for token in range(LONGEST):
        step = inputs[:, token : token + 1]
        expected, clean = rule(clean, step, [token] * 3, [1] * 3)
        mixed, dirty = rule(dirty, step, [token] * 3, [1] * 3)
        np.testing.assert_array_equal(mixed, expected)


def test_release_alone_makes_a_row_new(config, rule, inputs, operations):
    cache = init_cache(config, 3, 8)
    state = cache.layers[0]
    for _ in range(3):
        _, state = rule(state, inputs, [0, 0, 0], [LONGEST] * 3)
    lengths = jnp.full(3, LONGEST, jnp.int32)
    used = Cache(
        dataclasses.replace(cache.blocks, length=lengths),
        (state, cache.layers[1]),
        cache.block_size,
    )
    used = operations["release"](used, np.array([False, True, False]))
    start = np.asarray(used.length).tolist()
    assert start == [LONGEST, 0, LONGEST]
    mixed, _ = rule(used.layers[0], inputs, start, [1, LONGEST, 1])
    expected, _ = rule(empty_recurrent(config, 3), inputs, [0, 0, 0], [1, LONGEST, 1])
    np.testing.assert_array_equal(mixed[1], expected[1])


def test_row_without_new_tokens_keeps_its_state_to_the_bit(config, rule, inputs):
    _, state = rule(empty_recurrent(config, 3), inputs, [0, 0, 0], [LONGEST, 2, 0])
    state = poisoned(state, 2)
    for width in (1, LONGEST):
        _, after = rule(state, inputs[:, :width], [LONGEST, 2, 0], [0, 1, 0])
        for row in (0, 2):
            for kept, before in zip(row_of(after, row), row_of(state, row), strict=True):
                np.testing.assert_array_equal(kept, before)


def test_fork_copies_rows_of_state(config, rule, inputs, operations):
    cache = init_cache(config, 3, 8)
    _, state = rule(cache.layers[0], inputs, [0, 0, 0], [LONGEST, 2, 3])
    cache = dataclasses.replace(cache, layers=(state, cache.layers[1]))
    rows = [row_of(state, row) for row in range(3)]
    after = operations["fork"](cache, np.array([1, 0, 0], np.int32)).layers[0]
    for row, source in enumerate([1, 0, 0]):
        for copied, before in zip(row_of(after, row), rows[source], strict=True):
            np.testing.assert_array_equal(copied, before)
