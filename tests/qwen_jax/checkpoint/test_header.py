"""Hostile and damaged safetensors files, written byte by byte."""

from __future__ import annotations

import json
import re
import struct
import tempfile
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from qwen_jax.checkpoint.header import read_header
from qwen_jax.checkpoint.safetensors_io import open_folder
from qwen_jax.errors import CheckpointError


def entry(shape, offsets, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def file_bytes(header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def read(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    return read_header(tmp_path / "model.safetensors", "model.safetensors")


ONE = {"a": entry([1], [0, 4])}
DEEP = b"[" * 100_000


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ({"a": entry([1000, 1000], [0, 4])}, 4, "tensor a has shape .* = 4000000 bytes"),
        ({"a": entry([1], [4, 0])}, 4, "tensor a has data_offsets"),
        ({"a": entry([2], [0, 8])}, 4, "tensor a ends at byte 8 .* truncated"),
        ({"a": entry([1], [0, 4, 8])}, 8, "tensor a has data_offsets"),
        ({"a": entry([1], [0])}, 8, "tensor a has data_offsets"),
        ({"a": entry([1], [-4, 0])}, 4, "tensor a has data_offsets"),
        ({"a": entry([1], [0.0, 4.0])}, 4, "tensor a has data_offsets"),
        ({"a": entry([1], [0, 2**63 + 4])}, 4, "tensor a ends at byte"),
        ({"a": entry([-1], [0, 4])}, 4, "tensor a has shape"),
        ({"a": entry([True], [0, 4])}, 4, "tensor a has shape"),
        ({"a": entry([1.0], [0, 4])}, 4, "tensor a has shape"),
        ({"a": entry("1", [0, 4])}, 4, "tensor a has shape"),
        ({"a": entry([2**62, 4], [0, 0])}, 0, "tensor a has shape"),
        ({"a": entry([2**32, 2**32], [0, 0])}, 0, "tensor a has shape"),
        ({"a": entry([2**70], [0, 0])}, 0, "tensor a has shape"),
        ({"a": entry([1], [0, 4], "Q7")}, 4, "tensor a has dtype Q7"),
        ({"a": entry([1], [0, 4], ["F32"])}, 4, "tensor a has dtype"),
        ({"a": 1}, 4, "tensor a has no object"),
        ({"a": {"dtype": "F32", "shape": [1]}}, 4, "tensor a has no object"),
        ({"a": entry([1], [0, 4]), "b": entry([1], [0, 4])}, 4, "tensor b overlaps tensor a"),
        ({"a": entry([2], [0, 8]), "b": entry([2], [4, 12])}, 12, "tensor b overlaps tensor a"),
        ({"a": entry([1], [0, 4]), "b": entry([1], [8, 12])}, 12, "tensor b leaves a gap of 4"),
        ({"a": entry([1], [4, 8])}, 8, "tensor a leaves a gap of 4 bytes after the start"),
        (ONE, 12, "8 bytes follow tensor a"),
        (b'{"a":%s,"a":%s}' % ((json.dumps(ONE["a"]).encode(),) * 2), 4, "duplicate keys: a"),
        (b"[]", 0, "not a JSON object"),
        (b"", 0, "header length 0"),
        (b"{", 0, "JSON"),
        (b"", 1, "header length 0"),
        (DEEP, 0, ""),
        (b'{"\xff": 1}', 0, "(?i:utf-8)"),
        (b'{"a": NaN}', 0, "tensor a has no object"),
        (b'{"__metadata__": {"format": 1}}', 0, ""),
        (b'{"a": %s}' % (b"9" * 5000), 0, ""),
    ],
)
def test_malformed_headers_are_refused_by_name(tmp_path, header, data, message):
    with pytest.raises(CheckpointError, match=f"(?s)^model.safetensors: .*{message}"):
        read(tmp_path, file_bytes(header, bytes(data)))


@pytest.mark.parametrize("size", [0, 1, 7, 8])
def test_files_shorter_than_a_header_are_refused(tmp_path, size):
    with pytest.raises(CheckpointError, match=r"^model.safetensors: .*header"):
        read(tmp_path, bytes(size))


@pytest.mark.parametrize("extra", [1, 8, 2**31, 2**62, 2**63 - 100, 2**63])
def test_header_lengths_beyond_the_file_are_refused_without_allocating(tmp_path, extra):
    text = json.dumps(ONE).encode()
    content = file_bytes(text, bytes(4), length=len(text) + 4 + extra)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match="header length"):
            read(tmp_path, content)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kept", [0, 5, 8, 30, 70, 80])
def test_truncated_files_are_refused(tmp_path, kept):
    content = file_bytes({"a": entry([8], [0, 32])}, bytes(32))
    with pytest.raises(CheckpointError, match=r"^model.safetensors: "):
        read(tmp_path, content[:kept])


@pytest.mark.parametrize(
    "header",
    [
        json.dumps(ONE).encode() + b" " * 100,
        json.dumps({**ONE, "__metadata__": {"format": "pt"}}).encode(),
    ],
)
def test_padded_headers_and_metadata_are_read(tmp_path, header):
    tensors = read(tmp_path, file_bytes(header, struct.pack("<f", 2.5)))
    assert tensors.keys() == {"a"}
    assert tensors["a"].shape == (1,)
    np.testing.assert_array_equal(open_folder(tmp_path).read("a"), [2.5])


def test_header_that_fills_the_file_is_read(tmp_path):
    tensors = read(tmp_path, file_bytes({"a": entry([0, 5], [0, 0])}))
    assert tensors["a"].shape == (0, 5)
    assert open_folder(tmp_path).read("a").shape == (0, 5)


@pytest.mark.parametrize("header", [b"{}", b'{"__metadata__": {"format": "pt"}}'])
def test_header_without_tensors_is_valid_but_no_model(tmp_path, header):
    assert read(tmp_path, file_bytes(header)) == {}
    with pytest.raises(CheckpointError, match="holds no tensors"):
        open_folder(tmp_path)


def test_git_lfs_pointer_is_recognised(tmp_path):
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"
    with pytest.raises(CheckpointError, match="git lfs pull"):
        read(tmp_path, pointer)


def test_names_from_files_cannot_steer_a_terminal(tmp_path):
    name = "\x1b[2J" + "x" * 10_000
    with pytest.raises(CheckpointError) as caught:
        read(tmp_path, file_bytes({name: entry([2], [0, 4])}, bytes(4)))
    assert "\x1b" not in str(caught.value)
    assert len(str(caught.value)) < 1000


VALID = file_bytes(
    {"a": entry([2, 3], [0, 24]), "b": entry([4], [24, 32], "BF16"), "__metadata__": {"k": "v"}},
    bytes(32),
)
numbers = st.integers(-1, 40) | st.sampled_from([2**31, 2**53, 2**63, 2**64, 0.5, None, True])
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "U8", "F4", "Q7", 3]),
        "shape": st.lists(numbers, max_size=3),
        "data_offsets": st.lists(numbers, max_size=3),
    }
)


def either_reads_or_refuses(content):
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "model.safetensors").write_bytes(content)
        try:
            opened = open_folder(folder)
            arrays = {}
            for name, info in opened.tensors.items():
                if re.match("F4|F6", info.dtype):
                    continue
                arrays[name] = opened.read(name)
        except CheckpointError:
            return
        for name, array in arrays.items():
            info = opened.tensors[name]
            assert array.shape == info.shape
            assert array.nbytes == info.nbytes <= len(content)


@given(st.lists(st.tuples(st.integers(0, len(VALID) - 1), st.integers(0, 255)), max_size=4))
@example([])
def test_flipped_bytes_are_read_or_refused(changes):
    content = bytearray(VALID)
    for place, value in changes:
        content[place] = value
    either_reads_or_refuses(bytes(content))


@given(st.dictionaries(st.text(max_size=3), entries, max_size=3), st.integers(0, 40))
def test_random_headers_are_read_or_refused(header, data):
    either_reads_or_refuses(file_bytes(header, bytes(data)))


@given(st.binary(max_size=60), st.integers(0, 2**64 - 1) | st.none())
def test_random_bytes_are_read_or_refused(text, length):
    either_reads_or_refuses(file_bytes(text, length=length))
