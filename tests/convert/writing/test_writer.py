"""Folders written whole: what is in them, and what is refused on the way."""

from __future__ import annotations

import json
import mmap
import threading
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from convert.writing import OutputTensor, plan_shards, prefetch, verify_folder
from qwen_jax.checkpoint.safetensors_io import open_folder
from qwen_jax.errors import CheckpointError
from tests.convert.writing.folders import (
    SHARDS,
    contents,
    finish,
    random_arrays,
    sha256,
    tensor,
    three_shards,
    write,
)


def test_folder_holds_every_tensor_bit_for_bit(tmp_path):
    arrays = random_arrays()
    written = write(tmp_path / "out")
    opened = open_folder(tmp_path / "out")
    assert set(opened.tensors) == set(arrays)
    for key, array in arrays.items():
        found = opened.read(key)
        assert found.dtype == array.dtype
        assert found.shape == array.shape
        assert found.tobytes() == array.tobytes()
    assert written.checksums == {key: sha256(array) for key, array in arrays.items()}
    assert (written.shards, written.reused, written.notes) == (SHARDS, (), ())
    assert written.nbytes == sum((tmp_path / "out" / name).stat().st_size for name in SHARDS)


def test_public_reader_agrees(tmp_path):
    arrays = random_arrays()
    write(tmp_path / "out")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {
        "total_size": sum(array.nbytes for array in arrays.values()),
        "made_by": "a test",
    }
    assert list(index["weight_map"]) == sorted(arrays)
    plain = [key for key, array in arrays.items() if array.dtype.kind in "uif"]
    for key in plain:
        with safe_open(tmp_path / "out" / index["weight_map"][key], "numpy") as shard:
            assert shard.metadata() == {"format": "pt"}
            np.testing.assert_array_equal(shard.get_tensor(key), arrays[key])


def test_nothing_but_the_model_is_left(tmp_path):
    write(tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert set(contents(tmp_path / "out")) == {
        *SHARDS,
        "model.safetensors.index.json",
        "config.json",
        "sums.json",
        "tokenizer/vocab.txt",
    }


def test_one_shard_also_has_an_index(tmp_path):
    tensors = [tensor(key, array) for key, array in random_arrays().items()]
    assert write(tmp_path / "out", [tensors]).shards == ("model-00001-of-00001.safetensors",)
    assert (tmp_path / "out" / "model.safetensors.index.json").is_file()


def test_tensor_larger_than_a_shard_lies_alone(tmp_path):
    arrays = random_arrays()
    shards = plan_shards([tensor(key, array) for key, array in arrays.items()], 1000)
    write(tmp_path / "out", shards)
    shard = open_folder(tmp_path / "out").tensors["f.large"].shard
    with safe_open(tmp_path / "out" / shard, "numpy") as opened:
        assert list(opened.keys()) == ["f.large"]


def test_destination_may_be_an_empty_folder_and_parents_may_be_missing(tmp_path):
    (tmp_path / "empty").mkdir()
    write(tmp_path / "empty")
    write(tmp_path / "a" / "b" / "out")
    assert contents(tmp_path / "empty") == contents(tmp_path / "a" / "b" / "out")


def test_relative_destination(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(Path("out"))
    assert (tmp_path / "out" / "config.json").is_file()


def test_chunks_larger_than_a_piece_are_cut_not_copied(tmp_path, monkeypatch):
    monkeypatch.setattr(prefetch, "PIECE", 1000)
    rng = np.random.default_rng(0)
    arrays = {"x": rng.standard_normal((3000,)).astype(ml_dtypes.bfloat16)}
    steps = []
    write(tmp_path / "out", [[tensor("x", arrays["x"], rows=3000)]], progress=steps.append)
    assert steps == [1000] * 6
    assert open_folder(tmp_path / "out").read("x").tobytes() == arrays["x"].tobytes()


def test_views_of_a_mapped_file_of_any_alignment(tmp_path):
    data = np.random.default_rng(0).integers(0, 256, 30_001, np.uint8).tobytes()
    (tmp_path / "source").write_bytes(data)
    with (tmp_path / "source").open("rb") as stream:
        mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    view = np.frombuffer(mapped, np.uint8)[1:].view(ml_dtypes.bfloat16)
    assert not view.flags.writeable
    write(tmp_path / "out", [[OutputTensor("x", "BF16", (15_000,), lambda: iter([view]))]])
    assert open_folder(tmp_path / "out").read("x").tobytes() == data[1:]


def test_progress_counts_the_bytes_of_the_tensors(tmp_path):
    steps = []
    write(tmp_path / "out", progress=steps.append)
    assert sum(steps) == sum(array.nbytes for array in random_arrays().values())


def test_few_chunks_are_alive_at_once(tmp_path):
    alive, most, lock = 0, 0, threading.Lock()

    class Counted(np.ndarray):
        def __del__(self):
            nonlocal alive
            with lock:
                alive -= 1

    def chunks():
        nonlocal alive, most
        for _ in range(60):
            with lock:
                alive += 1
                most = max(most, alive)
            array = np.zeros(1000, np.uint8)
            yield np.ndarray.__new__(Counted, (1000,), np.uint8, array)

    write(tmp_path / "out", [[OutputTensor("x", "U8", (60_000,), chunks)]])
    assert most <= prefetch.AHEAD + 4


@pytest.mark.parametrize(
    ("chunks", "told"),
    [
        ([np.zeros(3, np.float32)], "12 bytes, F32 of shape .4. has 16"),
        ([np.zeros(4, np.float32), np.zeros(1, np.float32)], "20 bytes, F32 of shape .4. has 16"),
        ([], "0 bytes, F32 of shape .4. has 16"),
        ([np.zeros(8, np.float16)], "chunk of float16"),
        ([np.zeros(8, np.float32)[::2]], "C-contiguous"),
    ],
)
def test_chunks_that_do_not_fit_are_an_internal_error_that_leaves_nothing(tmp_path, chunks, told):
    bad = OutputTensor("bad", "F32", (4,), lambda: iter(chunks))
    with pytest.raises(RuntimeError, match=told):
        write(tmp_path / "new" / "out", [[bad]])
    assert list(tmp_path.iterdir()) == []
    good = tensor("good", np.zeros(3, np.uint8))
    with pytest.raises(RuntimeError, match="internal error"):
        write(tmp_path / "out", [[good], [bad]])
    assert set(contents(tmp_path)) == {
        "out.partial/journal.jsonl",
        "out.partial/model-00001-of-00002.safetensors",
    }


def test_side_files_may_not_replace_what_is_written_here(tmp_path):
    for name in ("model.safetensors.index.json", SHARDS[0], "journal.jsonl"):
        with pytest.raises(RuntimeError, match="side files may not be called"):
            write(
                tmp_path / "out",
                finish=lambda folder, sums, remarks, name=name: (folder / name).touch(),
                resume=True,
            )
    write(tmp_path / "out", resume=True)


def test_verify_folder_names_each_fault(tmp_path):
    arrays = random_arrays()
    written = write(tmp_path / "out")
    steps = []
    assert verify_folder(tmp_path / "out", written.checksums, steps.append) == []
    assert sum(steps) == sum(array.nbytes for array in arrays.values())

    sums = dict(written.checksums)
    sums["gone"] = sums.pop("a.weight")
    info = open_folder(tmp_path / "out").tensors["f.large"]
    with (tmp_path / "out" / info.shard).open("r+b") as stream:
        stream.seek(info.stop - 1)
        last = stream.read(1)[0]
        stream.seek(info.stop - 1)
        stream.write(bytes([last ^ 1]))
    faults = verify_folder(tmp_path / "out", sums, lambda nbytes: None)
    assert [(fault.kind, fault.key) for fault in faults] == [
        ("missing", "gone"),
        ("extra", "a.weight"),
        ("different", "f.large"),
    ]
    assert str(faults[2]) == "f.large: different"


def test_verify_folder_refuses_a_folder_that_does_not_open(tmp_path):
    written = write(tmp_path / "out")
    (tmp_path / "out" / SHARDS[1]).unlink()
    with pytest.raises(CheckpointError, match=SHARDS[1]):
        verify_folder(tmp_path / "out", written.checksums, lambda nbytes: None)


def test_finish_gets_an_empty_folder_and_all_checksums(tmp_path):
    seen = {}

    def spy(folder, checksums, remarks):
        seen.update(checksums, files=list(folder.iterdir()))
        finish(folder, checksums, remarks)

    written = write(tmp_path / "out", finish=spy)
    assert seen.pop("files") == []
    assert seen == written.checksums


def test_shards_are_made_one_after_the_other(tmp_path):
    order = []

    def noted(key, array):
        made = tensor(key, array)
        return OutputTensor(
            key, made.dtype, made.shape, lambda: (order.append(key), made.chunks())[1]
        )

    arrays = random_arrays()
    shards = three_shards(arrays)
    write(tmp_path / "out", [[noted(t.key, arrays[t.key]) for t in s] for s in shards])
    by_width = [sorted(s, key=lambda t: -arrays[t.key].dtype.itemsize) for s in shards]
    assert order == [t.key for s in by_width for t in s]
