"""Opening folders: shards, indices, links, strays, and reading without copies."""

from __future__ import annotations

import json
import os
import shutil
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from qwen_jax.checkpoint.safetensors_io import open_folder
from qwen_jax.errors import CheckpointError

ARRAYS = {f"t{i}": np.full((2, 3), i, np.float32) for i in range(7)}
INDEX = "model.safetensors.index.json"
FIRST, SECOND = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))


@pytest.fixture
def sharded(write_folder):
    return write_folder(ARRAYS, shards=2)


def edit_index(folder, change):
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def refused(folder, *patterns):
    with pytest.raises(CheckpointError) as caught:
        open_folder(folder)
    for pattern in patterns:
        assert pattern in str(caught.value)
    return str(caught.value)


def test_single_file_and_shards_read_the_same(write_folder, sharded):
    single = open_folder(write_folder(ARRAYS, name="single"))
    both = open_folder(str(sharded))
    assert single.tensors.keys() == both.tensors.keys() == ARRAYS.keys()
    assert single.nbytes == both.nbytes == 7 * 24
    assert both.shards == (FIRST, SECOND)
    assert both.notes == single.notes == ()
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(single.read(name), array)
        np.testing.assert_array_equal(both.read(name), array)


def test_any_name_will_do_for_the_only_file(tmp_path):
    save_file(ARRAYS, tmp_path / "weights.safetensors")
    assert open_folder(tmp_path).shards == ("weights.safetensors",)


@pytest.mark.parametrize(
    "dtype",
    [
        ml_dtypes.bfloat16, np.float16, np.float32, np.float64, np.uint8, np.int64, np.bool_,
        ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e8m0fnu,
    ],
)  # fmt: skip
def test_every_dtype_is_read_as_it_was_written(write_folder, dtype):
    values = np.array([[1, 2], [4, 1]]).astype(dtype)
    folder = open_folder(write_folder({"odd": np.ones(3, np.uint8), "x": values}))
    read = folder.read("x")
    assert read.dtype == values.dtype
    np.testing.assert_array_equal(read, values)


def test_reading_copies_nothing_and_cannot_write(write_folder):
    folder = open_folder(write_folder({"x": np.ones((512, 1024), np.float32)}))
    tracemalloc.start()
    try:
        read = folder.read("x")
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()
    assert np.shares_memory(read, folder.read("x"))
    with pytest.raises(ValueError, match="read-only"):
        read[0] = 0


def test_unknown_name_is_refused(write_folder):
    with pytest.raises(CheckpointError, match="holds no tensor t9"):
        open_folder(write_folder(ARRAYS)).read("t9")


def test_dtype_that_numpy_lacks_is_refused_when_it_is_read(tmp_path):
    entry = {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}
    text = json.dumps({"x": entry}).encode()
    content = len(text).to_bytes(8, "little") + text + bytes(2)
    (tmp_path / "model.safetensors").write_bytes(content)
    folder = open_folder(tmp_path)
    with pytest.raises(CheckpointError, match=r"model.safetensors: tensor x has dtype F4"):
        folder.read("x")


def test_file_cut_short_after_opening_is_refused(write_folder):
    path = write_folder(ARRAYS)
    folder = open_folder(path)
    os.truncate(path / "model.safetensors", 16)
    with pytest.raises(CheckpointError, match="cut short"):
        folder.read("t6")


def test_missing_shard_is_named_with_what_it_holds(sharded):
    (sharded / SECOND).unlink()
    refused(sharded, f"{SECOND}, which holds 3 of 7 tensors: missing", "Download")


def test_every_missing_shard_is_named(sharded):
    (sharded / FIRST).unlink()
    (sharded / SECOND).unlink()
    refused(sharded, FIRST, SECOND, "(2)")


def test_every_truncated_shard_is_named(sharded):
    for shard in (FIRST, SECOND):
        size = (sharded / shard).stat().st_size
        os.truncate(sharded / shard, size - 4)
    refused(sharded, FIRST, SECOND, "truncated")


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_shard_that_is_no_regular_file_is_refused(sharded, make):
    (sharded / SECOND).unlink()
    make(sharded / SECOND)
    refused(sharded, f"{SECOND}, which holds 3 of 7 tensors: not a regular file")


@pytest.mark.parametrize(
    "place",
    [
        "../other/x.safetensors", "/etc/x.safetensors", "sub/../../x.safetensors", "..", "", ".",
        "./x.safetensors", "sub//x.safetensors", "sub\\x.safetensors", "C:/x.safetensors",
        "x.safetensors\n", "x\0.safetensors", "config.json", 7, None, ["x.safetensors"],
    ],
)  # fmt: skip
def test_paths_that_leave_the_folder_are_refused(sharded, place):
    other = sharded.parent / "other"
    other.mkdir()
    shutil.copy(sharded / FIRST, other / "x.safetensors")
    edit_index(sharded, lambda placed: placed.update(t0=place))
    refused(sharded, "refused paths (1)", "Accepted")


def test_shard_in_a_subfolder_is_read(sharded):
    (sharded / "sub").mkdir()
    (sharded / SECOND).rename(sharded / "sub" / SECOND)
    moved = {name: f"sub/{SECOND}" for name in sorted(ARRAYS)[1::2]}
    edit_index(sharded, lambda placed: placed.update(moved))
    np.testing.assert_array_equal(open_folder(sharded).read("t1"), ARRAYS["t1"])


def test_links_to_blobs_are_followed(sharded):
    blobs = sharded.parent / "blobs"
    blobs.mkdir()
    for shard in (FIRST, SECOND):
        (sharded / shard).rename(blobs / shard[:11])
        (sharded / shard).symlink_to(blobs / shard[:11])
    np.testing.assert_array_equal(open_folder(sharded).read("t6"), ARRAYS["t6"])


def test_link_that_leads_nowhere_is_refused(sharded):
    (sharded / SECOND).unlink()
    (sharded / SECOND).symlink_to(sharded.parent / "blobs" / "gone")
    refused(sharded, SECOND, "a symbolic link that leads nowhere")


def test_stray_file_beside_the_index_is_ignored_and_noted(sharded):
    others = {name: array + 100 for name, array in ARRAYS.items()}
    save_file(others, sharded / "model.safetensors")
    folder = open_folder(sharded)
    np.testing.assert_array_equal(folder.read("t3"), ARRAYS["t3"])
    assert len(folder.notes) == 1
    assert "model.safetensors" in folder.notes[0]


def test_stray_file_beside_the_single_file_is_ignored_and_noted(write_folder):
    path = write_folder(ARRAYS)
    save_file({"adapter": ARRAYS["t0"]}, path / "adapter.safetensors")
    folder = open_folder(path)
    assert folder.tensors.keys() == ARRAYS.keys()
    assert "adapter.safetensors" in folder.notes[0]


def test_shards_without_an_index_are_named(sharded):
    (sharded / INDEX).unlink()
    refused(sharded, FIRST, SECOND, INDEX)


def test_index_and_shards_that_disagree_are_refused_together(sharded):
    save_file({"t0": ARRAYS["t0"], "t1": ARRAYS["t1"], "extra": ARRAYS["t2"]}, sharded / FIRST)
    message = refused(
        sharded,
        "not in the index (1)",
        f"extra (in {FIRST})",
        f"t1 is in {FIRST}, the index says {SECOND}",
        "in the index only (3)",
        f"t2 (not in {FIRST})",
    )
    assert "t3" not in message


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[]", b"{}", b'{"weight_map": {}}', b'{"weight_map": []}', b'\xff{"a": 1}',
        b'{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', b"[" * 100_000,
    ],
)  # fmt: skip
def test_damaged_index_is_refused(sharded, content):
    (sharded / INDEX).write_bytes(content)
    refused(sharded, INDEX)


def test_long_lists_are_cut_and_counted(write_folder):
    path = write_folder({f"t{i:02}": np.zeros(1, np.float32) for i in range(60)}, shards=1)
    edit_index(path, lambda placed: [placed.pop(f"t{i:02}") for i in range(50)])
    message = refused(path, "not in the index (50)", "t00 ", "t19 ", "30 more")
    assert "t20 " not in message


@pytest.mark.parametrize(
    ("file", "format"),
    [
        ("model.Q4_K_M.gguf", "GGUF"),
        ("pytorch_model.bin", "PyTorch"),
        ("consolidated.00.pth", "PyTorch"),
        ("weights.npz", "MLX"),
        ("flax_model.msgpack", "Flax"),
    ],
)
def test_other_weight_formats_are_refused_by_name(tmp_path, file, format):
    (tmp_path / file).touch()
    refused(tmp_path, format, file, "only safetensors")


def test_folder_without_weights_is_refused(tmp_path):
    refused(tmp_path, "no *.safetensors", INDEX)
    refused(tmp_path / "nowhere", "does not exist")
    (tmp_path / "file").touch()
    refused(tmp_path / "file", "is not a folder")
