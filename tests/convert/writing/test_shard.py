"""Grouping of tensors into shards, and the headers of the shards."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from convert.writing import OutputTensor
from convert.writing.shard import lay_out, plan_digest, plan_shards
from qwen_jax.errors import RequestError
from tests.convert.writing.folders import random_arrays, tensor, three_shards


def of_bytes(nbytes: int, key: str = "x") -> OutputTensor:
    return OutputTensor(key, "U8", (nbytes,), lambda: iter(()))


def grouped(sizes: list[int], max_bytes: int) -> list[list[int]]:
    return [[t.nbytes for t in s] for s in plan_shards(map(of_bytes, sizes), max_bytes)]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([4, 6, 1], [[4, 6], [1]]),
        ([4, 7], [[4], [7]]),
        ([3, 25, 3], [[3], [25], [3]]),
        ([25, 0, 25], [[25], [0], [25]]),
        ([10, 0, 10], [[10, 0], [10]]),
        ([], []),
    ],
)
def test_whole_tensors_are_grouped_in_order(sizes, expected):
    assert grouped(sizes, 10) == expected


@given(st.lists(st.integers(0, 30)), st.integers(1, 40))
def test_no_shard_is_too_large_unless_one_tensor_is(sizes, limit):
    shards = grouped(sizes, limit)
    assert [size for shard in shards for size in shard] == sizes
    for shard, following in itertools.pairwise(shards):
        assert sum(shard) + following[0] > limit
    assert all(sum(shard) <= limit or len(shard) == 1 for shard in shards)


def test_parts_never_share_a_shard():
    parts = [replace(of_bytes(1), part=part) for part in ("a", "a", "b", "b", "b", "a")]
    shards = plan_shards(parts, 2)
    assert [[tensor.part for tensor in shard] for shard in shards] == [
        ["a", "a"],
        ["b", "b"],
        ["b"],
        ["a"],
    ]


def test_limit_must_be_positive():
    with pytest.raises(RequestError, match="shards of 0 bytes"):
        plan_shards([], 0)


def test_header_is_padded_to_a_page_and_tensors_are_aligned():
    for shard in lay_out(three_shards(random_arrays()), {"format": "pt"}):
        length = int.from_bytes(shard.header[:8], "little")
        assert len(shard.header) == 8 + length
        assert len(shard.header) % 4096 == 0
        header = json.loads(shard.header[8:])
        assert header.pop("__metadata__") == {"format": "pt"}
        end = 0
        for entry in header.values():
            begin, stop = entry["data_offsets"]
            width = {"U8": 1, "F8_E4M3": 1, "BF16": 2, "I32": 4, "F32": 4}[entry["dtype"]]
            assert begin == end
            assert begin % width == 0
            assert stop - begin == width * int(np.prod(entry["shape"]))
            end = stop
        assert end == shard.data_bytes


def test_header_that_just_fits_a_page_is_not_padded_by_another():
    for length in range(3900, 4100):
        (shard,) = lay_out([[of_bytes(1, "k" * length)]], {})
        text = shard.header.rstrip(b" ")
        assert 0 <= len(shard.header) - len(text) < 4096
        assert len(shard.header) % 4096 == 0


def test_names_count_the_shards():
    shards = lay_out([[of_bytes(1, str(n))] for n in range(3)], {})
    assert [shard.name for shard in shards] == [
        "model-00001-of-00003.safetensors",
        "model-00002-of-00003.safetensors",
        "model-00003-of-00003.safetensors",
    ]


def test_digest_tells_plans_apart():
    arrays = random_arrays()
    plans = [
        lay_out(three_shards(arrays), {}),
        lay_out(three_shards(arrays), {"format": "pt"}),
        lay_out([[tensor(key, array)] for key, array in arrays.items()], {}),
        lay_out(three_shards({**arrays, "a.weight": arrays["a.weight"].T.copy()}), {}),
    ]
    assert len({plan_digest(plan) for plan in plans}) == 4
    assert plan_digest(plans[0]) == plan_digest(lay_out(three_shards(arrays), {}))


@pytest.mark.parametrize(
    ("groups", "told"),
    [
        ([], "0 shards"),
        ([[]], "empty shards: 1"),
        ([[of_bytes(1, "k")], [of_bytes(2, "k")]], "given twice: k"),
        ([[OutputTensor("k", "F4", (2,), lambda: iter(()))]], "not known: F4"),
    ],
)
def test_plan_that_cannot_be_written_is_an_internal_error(groups, told):
    with pytest.raises(RuntimeError, match=told):
        lay_out(groups, {})
