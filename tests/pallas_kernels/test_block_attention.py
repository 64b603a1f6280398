"""`block_attention` against the formula, in a pool where all that is not a live token is NaN."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.flash_attention import flash_attention
from pallas_kernels.testing import norm_error, relative_error
from tests.pallas_kernels.blocks import Blocks, ragged

run_flash = jax.jit(flash_attention, static_argnames="window")

LENGTHS = [515, 1, 63, 200, 64, 65]


@pytest.mark.parametrize(
    ("block_size", "window"),
    [(64, None), (64, 65), (1, None), (3, 64), (16, 200), (600, None)],
)
def test_one_new_token_a_row(normal, block_size, window):
    blocks = Blocks.of(LENGTHS, block_size)
    q, positions = normal(6, 1, 4, 8), ragged(LENGTHS, [1] * 6)
    mixed = blocks.attend(q, positions, window)
    np.testing.assert_allclose(mixed, blocks.oracle(q, positions, window), atol=2e-6)


@pytest.mark.parametrize(("block_size", "window"), [(64, None), (16, 20), (3, 1)])
def test_chunk_of_queries_against_cached_tokens(normal, block_size, window):
    blocks = Blocks.of(LENGTHS, block_size)
    new = [65, 1, 63, 0, 7, 33]
    q, positions = normal(6, 65, 4, 8), ragged(LENGTHS, new)
    mixed = blocks.attend(q, positions, window)
    np.testing.assert_allclose(mixed, blocks.oracle(q, positions, window), atol=2e-6)
    assert not mixed[positions < 0].any()


@pytest.mark.parametrize(("window", "sinks"), [(64, 4), (30, 70), (600, 1)])
def test_sinks_stay_visible_beside_the_window(normal, window, sinks):
    blocks = Blocks.of(LENGTHS, 64)
    q, positions = normal(6, 3, 4, 8), ragged(LENGTHS, [3, 1, 3, 0, 3, 2])
    mixed = blocks.attend(q, positions, window, sinks=sinks)
    np.testing.assert_allclose(mixed, blocks.oracle(q, positions, window, sinks), atol=2e-6)


@pytest.mark.parametrize("window", [None, 600])
def test_whole_sequences_over_three_tiles_of_keys(normal, window):
    lengths = [1100, 515]
    blocks = Blocks.of(lengths, 64)
    q, positions = normal(2, 1100, 4, 8), ragged(lengths, lengths)
    mixed = blocks.attend(q, positions, window)
    few = [0, 511, 512, 1023, 1024, 1099]
    expected = blocks.oracle(q[:, few], positions[:, few], window)
    np.testing.assert_allclose(mixed[:, few], expected, atol=2e-6)
    plain = run_flash(q[:1], blocks.key[:1], blocks.value[:1], window=window)
    np.testing.assert_allclose(mixed[:1], plain, atol=5e-6)


@pytest.mark.parametrize("columns", [5, 16, 32, 35])
def test_width_of_the_table_does_not_matter(normal, columns):
    lengths = [150, 97]
    blocks = Blocks.of(lengths, 32, columns=columns)  # a tile has 16 columns
    q, positions = normal(2, 3, 4, 8), ragged(lengths, [3, 2])
    np.testing.assert_allclose(blocks.attend(q, positions), blocks.oracle(q, positions), atol=2e-6)


@pytest.mark.parametrize("length", [511, 512, 513])
def test_borders_of_tiles(normal, length):
    blocks = Blocks.of([length, 3], 64, columns=18)
    q, positions = normal(2, 2, 4, 8), ragged([length, 3], [2, 1])
    for window in (None, 512):
        mixed = blocks.attend(q, positions, window)
        np.testing.assert_allclose(mixed, blocks.oracle(q, positions, window), atol=2e-6)


@pytest.mark.parametrize("heads", [(2, 2, 2), (6, 1, 3), (4, 4, 4)])
def test_heads_read_their_own_key_head(normal, heads):
    query_heads, kv_heads, width = heads
    blocks = Blocks.of([4, 2], 4, heads=kv_heads, width=width)
    q, positions = normal(2, 4, query_heads, width), ragged([4, 2], [4, 2])
    np.testing.assert_allclose(blocks.attend(q, positions), blocks.oracle(q, positions), atol=2e-6)


def test_batch_of_padding_alone_is_zero(normal):
    blocks = Blocks.of(LENGTHS, 64)
    positions = np.array([[-1], [-(2**31)], [-5], [-64], [-512], [-515]], np.int32)
    assert not blocks.attend(normal(6, 1, 4, 8), positions).any()


def test_queries_of_padding_may_hold_anything(normal):
    blocks = Blocks.of(LENGTHS, 64)
    q, positions = normal(6, 65, 4, 8), ragged(LENGTHS, [65, 1, 63, 0, 7, 33])
    expected = blocks.attend(q, positions)
    q[positions < 0] = np.nan
    np.testing.assert_array_equal(blocks.attend(q, positions), expected)


def test_position_behind_the_table_sees_each_token_once(normal):
    # It cannot come from a cache, which takes no token that its table has no room for.
    blocks = Blocks.of([1024], 64, columns=16)
    q = normal(1, 1, 4, 8)
    mixed = blocks.attend(q, np.array([[5000]], np.int32))
    np.testing.assert_allclose(mixed, blocks.oracle(q, np.array([[1023]])), atol=2e-6)


def test_large_scores_stay_finite(normal):
    blocks = Blocks.of(LENGTHS, 64)
    blocks.key_blocks *= 1e3
    q = 1e3 * normal(6, 1, 4, 8)
    mixed = blocks.attend(q, ragged(LENGTHS, [1] * 6))
    for row, length in enumerate(LENGTHS):
        key, value = (x[row, :length].repeat(2, axis=1) for x in (blocks.key, blocks.value))
        best = np.einsum("nh,snh->ns", q[row, 0], key).argmax(axis=1)
        np.testing.assert_allclose(mixed[row, 0], value[best, np.arange(4)], atol=1e-3)


def test_bfloat16_is_summed_in_float32(normal):
    blocks = Blocks.of([600, 65], 64)
    for name in ("key", "value", "key_blocks", "value_blocks"):
        setattr(blocks, name, jnp.asarray(getattr(blocks, name), jnp.bfloat16))
    q, positions = jnp.asarray(normal(2, 3, 4, 8), jnp.bfloat16), ragged([600, 65], [3, 2])
    mixed = blocks.attend(q, positions)
    assert mixed.dtype == jnp.bfloat16
    blocks.key, blocks.value = (np.asarray(x, np.float32) for x in (blocks.key, blocks.value))
    expected = blocks.oracle(np.asarray(q, np.float32), positions)
    np.testing.assert_allclose(mixed.astype(np.float32), expected, atol=4e-3)


@pytest.mark.parametrize(("block_size", "window"), [(64, None), (16, 20), (3, None)])
def test_int8_blocks_are_what_their_codes_stand_for(normal, block_size, window):
    blocks = Blocks.of(LENGTHS, block_size).quantised()
    q, positions = normal(6, 65, 4, 8), ragged(LENGTHS, [65, 1, 63, 0, 7, 33])
    mixed = blocks.attend(q, positions, window)
    np.testing.assert_allclose(mixed, blocks.oracle(q, positions, window), atol=5e-6)
    assert not mixed[positions < 0].any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_int8_blocks_with_an_outlier_channel(normal, dtype, record_property):
    blocks = Blocks.of(LENGTHS, 64, width=64, outlier=200.0)
    for name in ("key", "value", "key_blocks", "value_blocks"):
        setattr(blocks, name, getattr(blocks, name).astype(jnp.dtype(dtype)))
    q, positions = normal(6, 1, 4, 64).astype(jnp.dtype(dtype)), ragged(LENGTHS, [1] * 6)
    mixed, expected = blocks.quantised().attend(q, positions), blocks.oracle(q, positions)
    record_property("max error / rms", relative_error(mixed, expected))
    assert norm_error(mixed, expected) < 2e-2


def test_head_of_zeros_in_int8_is_finite(normal):
    blocks = Blocks.of(LENGTHS, 64)
    for name in ("key", "value"):
        pool = getattr(blocks, f"{name}_blocks")
        pool[:, 1] = np.where(np.isnan(pool[:, 1]), np.nan, 0.0)
    mixed = blocks.quantised().attend(normal(6, 1, 4, 8), ragged(LENGTHS, [1] * 6))
    assert np.isfinite(mixed).all() and mixed[:, :, :2].any()
    assert not mixed[:, :, 2:].any()
