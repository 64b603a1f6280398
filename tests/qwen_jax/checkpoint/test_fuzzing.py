"""Headers, indices and records put together from hostile pieces: refused in words, or read right.

`test_header` flips single bytes; here the JSON itself is strange.
"""

from __future__ import annotations

import dataclasses
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from qwen_jax.checkpoint.header import DTYPES
from qwen_jax.checkpoint.index import INDEX
from qwen_jax.checkpoint.mapping import Layout
from qwen_jax.checkpoint.native import RECORD, Record, read_record
from qwen_jax.checkpoint.safetensors_io import open_folder
from qwen_jax.errors import CheckpointError

DEEP = "[" * 3000 + "]" * 3000
# JSON values as text, since some of them no Python object spells.
STRANGE = (
    "null", "true", "[]", "{}", '""', "0", "-0", "1.0", "1e400", "NaN", "1" * 5000, str(2**63),
    str(2**64), DEEP, '{"a": 1, "a": 2}', '["a", ["b"]]', '"\\ud800"', '"\\u0000"', '"\x7f"',
    '"1"', '"2"', "[0, 4]", "[4, 0]", "[1]", "[2, 2]", "[-1]", "[0]", '"F32"', '"U8"',
)  # fmt: skip
NAMES = ("a", "b", "c", "", "é", "\\u00e9", "\\u0061", "\\ud83d\\ude00", "\\ud800", "\x7f", "../x")

fuzzed = settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
strange = st.sampled_from(STRANGE)
names = st.sampled_from(NAMES)


def object_text(pairs: list[tuple[str, str]]) -> str:
    return "{" + ", ".join(f'"{name}": {value}' for name, value in pairs) + "}"


@st.composite
def headers(draw: st.DrawFn) -> tuple[str, int]:
    """Tensors that follow one another as they should, with a strange part; and bytes of data."""
    entries, start = [], 0
    for name in draw(st.lists(names, unique=True, max_size=4)):
        shape = draw(st.lists(st.integers(0, 3), max_size=3))
        dtype = draw(st.sampled_from(["F32", "BF16", "U8", "F8_E4M3"] * 3 + ["F4", "Q7"]))
        stop = start + int(np.prod(shape)) * getattr(DTYPES.get(dtype), "itemsize", 1)
        fields = {"dtype": f'"{dtype}"', "shape": str(shape), "data_offsets": f"[{start}, {stop}]"}
        entries.append((name, fields))
        start = stop
    if entries and draw(st.integers(0, 2)) == 2:
        _, fields = draw(st.sampled_from(entries))
        fields[draw(st.sampled_from([*fields, "extra"]))] = draw(strange)
    pairs = [(name, object_text(list(fields.items()))) for name, fields in entries]
    if draw(st.integers(0, 2)) == 2:
        key = draw(st.sampled_from(["format", "qwen_jax_format_version"]))
        value = draw(st.sampled_from(['"1"', '"1"', '"2"']) | strange)
        inner = draw(st.sampled_from([object_text([(key, value)])]) | strange)
        pairs.insert(draw(st.integers(0, len(pairs))), ("__metadata__", inner))
    return object_text(pairs), max(start + draw(st.sampled_from([0] * 20 + [-1, 1])), 0)


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    assert len(found) == len(pairs)
    return found


def independent_reading(content: bytes) -> dict[str, tuple[str, list[int], bytes]]:
    """Dtype, shape and bytes of each tensor by the words of the format; asserts that it is kept."""
    (length,) = struct.unpack_from("<Q", content)
    header = json.loads(content[8 : 8 + length].decode(), object_pairs_hook=unique)
    metadata = header.pop("__metadata__", None) or {}
    assert all(isinstance(value, str) for value in metadata.values())
    assert metadata.get("qwen_jax_format_version", "1") == "1"
    data, end, found = content[8 + length :], 0, {}
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        (start, stop), shape = entry["data_offsets"], entry["shape"]
        assert start == end <= stop
        bits = 4 if entry["dtype"] == "F4" else 8 * DTYPES[entry["dtype"]].itemsize
        assert 8 * (stop - start) == bits * int(np.prod(shape, dtype=object))
        found[name], end = (entry["dtype"], shape, data[start:stop]), stop
    assert end == len(data)
    return found


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzzed")


def test_strange_headers(place):
    accepted = []

    @fuzzed
    @given(headers(), st.sampled_from([0] * 20 + [-1, 1, 8, 2**31, 2**62]))
    @example(('{"\\u00e9": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]}}', 3), 0)
    def check(header: tuple[str, int], off: int) -> None:
        text, data = header[0].encode(), bytes(range(header[1]))
        content = struct.pack("<Q", max(len(text) + off, 0)) + text + data
        (place / "model.safetensors").write_bytes(content)
        try:
            opened = open_folder(place)
        except CheckpointError as error:
            assert len(str(error)) < 5000
            return
        expected = independent_reading(content)
        accepted.append(header)
        assert opened.tensors.keys() == expected.keys()
        for name, (dtype, shape, raw) in expected.items():
            info = opened.tensors[name]
            assert (info.dtype, list(info.shape)) == (dtype, shape)
            if dtype in DTYPES:
                assert opened.read(name).tobytes() == raw

    check()
    assert len(accepted) > 20  # or else only the refusals would be tried


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    for name in ("x", "y"):
        arrays = {name + suffix: np.full(2, ord(name), np.uint8) for suffix in "12"}
        save_file(arrays, folder / f"{name}.safetensors")
    return folder


PLACES = ("x.safetensors", "y.safetensors", "z.safetensors", "../x.safetensors", "./x.safetensors",
          "/x.safetensors", "x", "", "x.safetensors/y.safetensors", "\\u0000.safetensors",
          "\\ud800.safetensors")  # fmt: skip
places = st.sampled_from([f'"{place}"' for place in PLACES])
KEYS = ("x1", "x2", "y1", "y2")


@fuzzed
@given(
    st.lists(st.tuples(st.sampled_from(KEYS) | names, places | strange), max_size=3),
    st.sampled_from(["weight_map"] * 6 + ["weights"]),
    strange,
    st.integers(0, 3),
)
@example([], "weight_map", "null", 0)
def test_strange_indices(sharded, changes, key, metadata, cut):
    placed = {name: f'"{name[0]}.safetensors"' for name in KEYS}
    pairs = list(placed.items()) + changes
    text = object_text([("metadata", metadata), (key, object_text(pairs))])
    (sharded / INDEX).write_bytes(text.encode()[: len(text) - cut if cut == 1 else None])
    try:
        opened = open_folder(sharded)
    except CheckpointError as error:
        assert len(str(error)) < 5000
        return
    assert not changes
    assert {name: info.shard for name, info in opened.tensors.items()} == {
        name: f"{name[0]}.safetensors" for name in KEYS
    }
    assert all((opened.read(name) == ord(name[0])).all() for name in KEYS)


VALID = json.loads(
    json.dumps(
        {
            "format_version": 1,
            **dataclasses.asdict(
                Record(
                    layout=Layout(),
                    formats={"GPTQ int4": 3},
                    skipped={"visual": 2},
                    adapters=("one",),
                    added_tokens=1,
                    checksums={"a": "0" * 64},
                )
            ),
        }
    )
)


@fuzzed
@given(
    st.lists(st.tuples(st.sampled_from([*VALID, "new"]), strange), max_size=2),
    st.sampled_from([*VALID] + [None] * 10),
    st.sampled_from([*VALID["layout"]] + [None] * 10),
    st.sampled_from([0] * 6 + [1, 40]),
)
@example([], None, None, 0)
def test_strange_records(place, changes, lacking, inner, cut):
    fields = {name: json.dumps(value) for name, value in VALID.items() if name != lacking}
    if inner is not None and "layout" in fields:
        fields["layout"] = json.dumps(VALID["layout"] | {inner: ["model."]})
    fields |= dict(changes)
    text = object_text(list(fields.items())).encode()
    (place / RECORD).write_bytes(text[: len(text) - cut])
    try:
        record = read_record(place)
    except CheckpointError as error:
        assert str(place / RECORD) in str(error)
        assert len(str(error)) < 5000
        return
    assert record is not None
    again = json.loads(json.dumps({"format_version": 1, **dataclasses.asdict(record)}))
    assert again == json.loads(text)
    assert all(type(count) is int for count in (*record.formats.values(), record.added_tokens))
    assert all(isinstance(text, str) for text in (*record.adapters, *record.checksums.values()))


@pytest.mark.parametrize("name", [INDEX, RECORD])
def test_files_of_gigabytes_are_not_read(place, name):
    with (place / name).open("wb") as stream:
        stream.truncate(20 << 30)
    with pytest.raises(CheckpointError, match=f"{name} cannot be read: it has 21474836480 bytes"):
        open_folder(place) if name == INDEX else read_record(place)
    (place / name).unlink()
