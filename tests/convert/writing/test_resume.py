"""Runs that end early, and those that continue them."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from convert.writing import OutputTensor
from qwen_jax.checkpoint.safetensors_io import open_folder
from qwen_jax.errors import CheckpointError
from tests.convert.writing.folders import (
    SHARDS,
    contents,
    failing,
    finish,
    interrupt,
    random_arrays,
    three_shards,
    undisturbed,
    write,
)


def made(shards: list[list[OutputTensor]]) -> tuple[list[list[OutputTensor]], list[str]]:
    """Shards that note which of their tensors are asked for."""
    keys: list[str] = []

    def noting(tensor: OutputTensor) -> Callable[[], Iterator[np.ndarray]]:
        return lambda: (keys.append(tensor.key), tensor.chunks())[1]

    noted = [[OutputTensor(t.key, t.dtype, t.shape, noting(t)) for t in s] for s in shards]
    return noted, keys


@pytest.mark.parametrize("shard", [1, 2])
def test_fault_of_the_source_keeps_finished_shards(out, work, shard):
    interrupt(out, shard)
    assert set(contents(work)) == {"journal.jsonl", *SHARDS[:shard]}
    assert not out.exists()
    shards, keys = made(three_shards(random_arrays()))
    written = write(out, shards, resume=True)
    assert written.reused == SHARDS[:shard]
    assert set(keys) == {t.key for s in shards[shard:] for t in s}
    assert contents(out) == undisturbed()
    assert not work.exists()


def test_fault_before_any_shard_is_finished_leaves_nothing(tmp_path, work):
    interrupt(tmp_path / "a" / "b" / "out", 0)
    assert list(tmp_path.iterdir()) == []
    interrupt(tmp_path / "out", 1)
    interrupted_again = failing(CheckpointError("damaged"), 1)
    with pytest.raises(CheckpointError, match="damaged"):
        write(tmp_path / "out", interrupted_again, resume=True)
    assert SHARDS[0] in contents(work)


def test_remarks_of_finished_shards_are_kept(out):
    """They are made after the chunks, once; a run that goes on finds them in the journal."""
    made: list[str] = []

    def remarked(tensor: OutputTensor) -> OutputTensor:
        def remark() -> dict[str, str]:
            made.append(tensor.key)
            return {"of": tensor.key}

        return replace(tensor, remark=remark)

    whole = [[remarked(shard[0]), *shard[1:]] for shard in three_shards(random_arrays())]
    broken = failing(CheckpointError("damaged"))
    with pytest.raises(CheckpointError, match="damaged"):
        write(out, [*whole[:2], broken[2]])
    first, second, third = (shard[0].key for shard in whole)
    assert made == [first, second]
    told: dict[str, object] = {}
    write(
        out,
        whole,
        resume=True,
        finish=lambda folder, checksums, remarks: told.update(remarks),
    )
    assert made == [first, second, third]
    assert told == {key: {"of": key} for key in (first, second, third)}


def test_interruption_from_the_keyboard(out, work):
    seen = 0

    def stop(nbytes: int) -> None:
        nonlocal seen
        seen += nbytes
        if seen > 1000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(out, progress=stop)
    assert set(contents(work)) == {"journal.jsonl", *SHARDS[:2]}
    write(out, resume=True)
    assert contents(out) == undisturbed()


def test_source_that_cannot_be_read_is_not_taken_for_the_destination(out):
    with pytest.raises(CheckpointError, match=r"f\.large cannot be made: .*input/output") as raised:
        write(out, failing(OSError(errno.EIO, "input/output error")))
    assert "free" not in str(raised.value)


def test_resume_where_nothing_was_begun_begins(out):
    written = write(out, resume=True)
    assert contents(out) == undisturbed()
    assert len(written.notes) == 1
    assert "nothing to continue" in written.notes[0]


@pytest.mark.parametrize("fault", ["a byte of data", "a byte of the header", "cut", "gone", "link"])
def test_finished_shard_that_is_bad_is_written_again(out, work, tmp_path, fault):
    interrupt(out)
    file = work / SHARDS[0]
    if fault == "cut":
        os.truncate(file, file.stat().st_size - 1)
    elif fault == "gone":
        file.unlink()
    elif fault == "link":
        shutil.move(file, tmp_path / "elsewhere")
        file.symlink_to(tmp_path / "elsewhere")
    else:
        content = bytearray(file.read_bytes())
        content[-1 if fault == "a byte of data" else 20] ^= 1
        file.write_bytes(content)
    steps = []
    written = write(out, resume=True, progress=steps.append)
    assert written.reused == SHARDS[1:2]
    assert len(written.notes) == 1
    assert SHARDS[0] in written.notes[0]
    assert "written again" in written.notes[0]
    assert sum(steps) == sum(array.nbytes for array in random_arrays().values())
    assert contents(out) == undisturbed()
    assert not (out / SHARDS[0]).is_symlink()


def test_fault_in_finish_keeps_all_shards(out, work):
    def broken(folder: Path, checksums: object, remarks: object) -> None:
        (folder / "config.json").write_text("{}")
        raise CheckpointError("no tokenizer")

    with pytest.raises(CheckpointError, match="no tokenizer"):
        write(out, finish=broken)
    assert set(contents(work)) == {"journal.jsonl", *SHARDS}
    with pytest.raises(CheckpointError, match=r"no model\.safetensors\.index\.json"):
        open_folder(work)
    shards, keys = made(three_shards(random_arrays()))
    assert write(out, shards, resume=True).reused == SHARDS
    assert keys == []
    assert contents(out) == undisturbed()


def test_destination_that_appears_meanwhile_is_not_touched(out, work):
    def appear(folder: Path, checksums: Mapping[str, str], remarks: Mapping[str, str]) -> None:
        finish(folder, checksums, remarks)
        out.mkdir()
        (out / "thesis.tex").write_text("x")

    with pytest.raises(CheckpointError, match="came into being"):
        write(out, finish=appear)
    assert contents(out) == {"thesis.tex": b"x"}
    assert set(contents(work)) == {"journal.jsonl", *SHARDS}
    shutil.rmtree(out)
    assert write(out, resume=True).reused == SHARDS
    assert contents(out) == undisturbed()


def test_journal_left_in_a_complete_folder(out, work, monkeypatch):
    def killed(path: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", killed)
        with pytest.raises(KeyboardInterrupt):
            write(out)
    assert {**contents(out), "journal.jsonl": b""} == {**undisturbed(), "journal.jsonl": b""}
    with pytest.raises(CheckpointError, match="--resume removes its journal"):
        write(out)
    with pytest.raises(CheckpointError, match="begun by another run"):
        write(out, resume=True, fingerprint={})
    assert write(out, resume=True).reused == SHARDS
    assert contents(out) == undisturbed()


def test_damage_in_a_complete_folder_is_reported_not_repaired(out, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", lambda path: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            write(out)
    os.truncate(out / SHARDS[1], 5000)
    with pytest.raises(CheckpointError, match=r"00002-of-00003\.safetensors has 5000 bytes"):
        write(out, resume=True)
    assert (out / "config.json").exists()
