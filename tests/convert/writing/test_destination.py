"""Destinations that can be written, and those that are refused before any work."""

from __future__ import annotations

import os
import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from convert.writing import OutputTensor
from convert.writing.destination import SLACK, check_destination
from qwen_jax.errors import CheckpointError
from tests.convert.writing.folders import random_arrays, tensor, write

Usage = namedtuple("Usage", "total used free")


def refusal(path: Path, *, resume: bool = False, nbytes: int = 10) -> str:
    """The message of the check, which must also be that of the writer, and change nothing."""
    before = sorted(path.parent.rglob("*")) if path.parent.exists() else []
    with pytest.raises(CheckpointError) as checked:
        check_destination(path, resume=resume, nbytes=nbytes)

    def never():
        pytest.fail("a tensor was made")
        yield

    with pytest.raises(CheckpointError) as written:
        write(path, [[OutputTensor("x", "U8", (nbytes - 4096,), never)]], resume=resume)
    assert before == (sorted(path.parent.rglob("*")) if path.parent.exists() else [])
    assert str(checked.value) == str(written.value)
    return str(checked.value)


def test_new_folder_is_accepted_and_nothing_is_made(tmp_path):
    place = check_destination(tmp_path / "a" / "b", resume=False, nbytes=10)
    assert (place.path, place.work) == (tmp_path / "a" / "b", tmp_path / "a" / "b.partial")
    assert not place.begun
    assert not place.complete
    assert list(tmp_path.iterdir()) == []


def test_occupied_folder_is_refused(tmp_path):
    (tmp_path / "out").mkdir()
    check_destination(tmp_path / "out", resume=False, nbytes=10)
    (tmp_path / "out" / "thesis.tex").touch()
    for resume in (False, True):
        told = refusal(tmp_path / "out", resume=resume, nbytes=5000)
        assert "exists and holds thesis.tex" in told
        assert "another destination" in told


def test_journal_of_something_else_is_not_taken_for_ours(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "journal.jsonl").write_text('{"day": 1}\n')
    told = refusal(tmp_path / "out", resume=True, nbytes=5000)
    assert "exists and holds journal.jsonl" in told


def test_file_or_link_in_the_place_is_refused(tmp_path):
    (tmp_path / "file").touch()
    assert "is a file" in refusal(tmp_path / "file", nbytes=5000)
    (tmp_path / "target").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "target")
    assert f"symbolic link to {tmp_path / 'target'}" in refusal(tmp_path / "link", nbytes=5000)
    (tmp_path / "dangling").symlink_to("nowhere")
    assert "symbolic link to nowhere" in refusal(tmp_path / "dangling", nbytes=5000)
    assert "is not a folder" in refusal(tmp_path / "file" / "out", nbytes=5000)


@pytest.mark.parametrize("resume", [False, True])
def test_work_folder_that_is_a_link_or_a_file_is_refused(tmp_path, resume):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out.partial").symlink_to(tmp_path / "elsewhere")
    told = refusal(tmp_path / "out", resume=resume, nbytes=5000)
    assert "out.partial is a symbolic link" in told
    assert list((tmp_path / "elsewhere").iterdir()) == []
    (tmp_path / "out.partial").unlink()
    (tmp_path / "out.partial").touch()
    assert "out.partial is a file" in refusal(tmp_path / "out", resume=resume, nbytes=5000)


def test_work_left_behind_needs_resume(tmp_path):
    (tmp_path / "out.partial").mkdir()
    told = refusal(tmp_path / "out", nbytes=5000)
    assert "--resume" in told
    assert str(tmp_path / "out.partial") in told
    assert check_destination(tmp_path / "out", resume=True, nbytes=10).begun


def test_place_where_a_disk_is_mounted_is_refused(tmp_path, monkeypatch):
    (tmp_path / "volume").mkdir()
    monkeypatch.setattr(Path, "is_mount", lambda self: self.name == "volume")
    told = refusal(tmp_path / "volume", nbytes=5000)
    assert "where a disk is mounted" in told
    assert "volume/model" in told


@pytest.mark.parametrize("name", ["/", "a/..", ".."])
def test_name_is_needed(name):
    with pytest.raises(CheckpointError, match="not a name for a new folder"):
        check_destination(Path(name), resume=False, nbytes=10)


def test_name_too_long_for_the_file_system(tmp_path):
    told = refusal(tmp_path / ("x" * 250), nbytes=5000)
    assert "cannot be written" in told
    assert "too long" in told


def test_parent_that_may_not_be_written_to(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    assert f"{tmp_path} may not be written to" in refusal(tmp_path / "a" / "out", nbytes=5000)


def test_room_is_checked(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, 3_000_000_000))
    check_destination(tmp_path / "out", resume=False, nbytes=3_000_000_000 - SLACK)
    told = refusal(tmp_path / "a" / "out", nbytes=5_000_000_000)
    assert "3.00 GB free" in told
    assert "5.00 GB are still to be written" in told
    assert "Free 2.07 GB" in told


def test_what_is_finished_needs_no_room(tmp_path, monkeypatch):
    def failing():
        raise CheckpointError("broken source")
        yield

    shards = [
        [tensor("x", random_arrays()["f.large"])],
        [OutputTensor("y", "U8", (1,), failing)],
    ]
    with pytest.raises(CheckpointError, match="broken source"):
        write(tmp_path / "out", shards)
    first = (tmp_path / "out.partial" / "model-00001-of-00002.safetensors").stat().st_size
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, SLACK + 4097))
    check_destination(tmp_path / "out", resume=True, nbytes=first + 4097)
    with pytest.raises(CheckpointError, match="still to be written"):
        check_destination(tmp_path / "out", resume=True, nbytes=first + 4098)
