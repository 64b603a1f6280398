"""Streams of codes against one big number, at every width."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convert.formats.packing import CHUNK, dequantise, group_map, unpack, words_for


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("count", [1, 7, 31, 32, 33, 100])
def test_unpack_inverts_a_stream(packing, bits, count):
    codes = np.random.default_rng(bits).integers(0, 2**bits, (3, count))
    words = np.array([packing.stream(row, bits) for row in codes], np.int32)
    assert words.shape[1] == words_for(count, bits)
    np.testing.assert_array_equal(unpack(words, bits, count), codes)
    wider = np.concatenate([words, np.full((3, 2), -1, np.int32)], axis=1)
    np.testing.assert_array_equal(unpack(wider, bits, count), codes)


def test_three_bits_cross_words_in_order(packing):
    """Codes i % 8 for i in 0..31: the tenth is split 2 + 1, the twenty-first 1 + 2."""
    words = np.array([packing.stream([i % 8 for i in range(32)], 3)], np.int32)
    as_bits = "".join(f"{int(word) & 0xFFFFFFFF:032b}"[::-1] for word in words[0])
    assert as_bits == "".join(f"{i % 8:03b}"[::-1] for i in range(32))
    np.testing.assert_array_equal(unpack(words, 3, 32)[0], np.arange(32) % 8)


@settings(max_examples=40)
@given(st.integers(1, 8), st.lists(st.integers(0, 255), min_size=1, max_size=70))
def test_unpack_any_codes(bits, codes):
    codes = [code % 2**bits for code in codes]
    number = sum(code << (bits * place) for place, code in enumerate(codes))
    words = np.frombuffer(number.to_bytes(4 * words_for(len(codes), bits), "little"), np.int32)
    np.testing.assert_array_equal(unpack(words[None], bits, len(codes))[0], codes)


def test_groups_in_order_become_a_size():
    assert group_map(None, 4, 12) == 4
    assert group_map(np.arange(12) // 4, 4, 12) == 4
    np.testing.assert_array_equal(group_map(None, 5, 12), np.arange(12) // 5)
    shuffled = np.arange(12)[::-1] // 4
    assert group_map(shuffled, 4, 12) is shuffled


@pytest.mark.parametrize("inputs", [3, CHUNK // 2, CHUNK + 1])
def test_rows_are_worked_on_in_runs(inputs):
    codes = np.arange(5 * inputs, dtype=np.int64).reshape(5, inputs).astype(np.int8)
    scales = np.arange(1, 6, dtype=np.float32)[:, None]
    values = dequantise(lambda low, high: codes[low:high], 3.0, scales, inputs, inputs)
    exact = (codes.astype(np.int64) - 3) * np.arange(1, 6)[:, None]
    np.testing.assert_array_equal(values.astype(np.float32), exact.astype(values.dtype))
