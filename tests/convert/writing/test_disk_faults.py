"""Disks that are full or fail."""

from __future__ import annotations

import errno
import itertools
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from convert.writing import OutputTensor
from convert.writing.disk import Syncer
from qwen_jax.errors import CheckpointError
from tests.convert.writing.folders import (
    SHARDS,
    contents,
    random_arrays,
    three_shards,
    undisturbed,
    write,
)

ROOT = Path(__file__).parents[3]


class Disk:
    """Room for so many bytes in files of some name, then an error; the last write is cut short."""

    def __init__(self, room: int, code: int = errno.ENOSPC, name: str = "") -> None:
        self.room = room
        self._error = OSError(code, os.strerror(code))
        self._name = name
        self._write = os.write
        self._lock = threading.Lock()

    def write(self, descriptor: int, data: memoryview) -> int:
        if self._name not in os.readlink(f"/proc/self/fd/{descriptor}"):
            return self._write(descriptor, data)
        with self._lock:
            if not self.room:
                raise self._error
            done = self._write(descriptor, data[: self.room])
            self.room -= done
            return done


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_full_disk(out, work, monkeypatch, code):
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", Disk(6000, code, SHARDS[2]).write)
        with pytest.raises(CheckpointError) as raised:
            write(out)
    told = str(raised.value)
    assert "2 of 3 shards (0.00 GB) are finished and kept" in told
    assert "--resume" in told
    assert str(work) in told
    assert (" are free" in told) == (code != errno.EIO)
    assert set(contents(work)) == {"journal.jsonl", *SHARDS[:2]}
    assert write(out, resume=True).reused == SHARDS[:2]
    assert contents(out) == undisturbed()


def test_disk_that_is_full_at_any_byte(tmp_path, monkeypatch):
    endless = Disk(1 << 30)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", endless.write)
        write(tmp_path / "all")
    total = (1 << 30) - endless.room
    for room in (0, 1, 200, *range(1000, total, 900), total - 1):
        out = tmp_path / f"out{room}"
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", Disk(room).write)
            with pytest.raises(CheckpointError, match=r"is full|cannot be made"):
                write(out)
        assert not out.exists()
        left = contents(tmp_path / f"{out.name}.partial")
        assert "config.json" not in left
        assert not any(name.endswith(".writing") for name in left)
        write(out, resume=True)
        assert contents(out) == undisturbed()


def test_disk_that_fails_when_synced(out, work, monkeypatch):
    calls = 0

    def fsync(descriptor: int) -> None:
        nonlocal calls
        if ".writing" in os.readlink(f"/proc/self/fd/{descriptor}"):
            calls += 1
            if calls == 2:
                raise OSError(errno.EIO, "input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with pytest.raises(CheckpointError, match="input/output error"):
            write(out)
    assert set(contents(work)) == {"journal.jsonl", SHARDS[0]}
    write(out, resume=True)
    assert contents(out) == undisturbed()


def one_shard() -> list[list[OutputTensor]]:
    return [list(itertools.chain(*three_shards(random_arrays())))]


def test_data_is_sent_to_the_disk_on_the_way(out, monkeypatch):
    monkeypatch.setattr(Syncer, "STEP", 1000)
    sent = set()

    def fdatasync(descriptor: int) -> None:
        sent.add(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    write(out, one_shard())
    assert sent == {"model-00001-of-00001.safetensors.writing"}


def test_fault_on_the_way_to_the_disk_is_not_forgotten(out, work, monkeypatch):
    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, "input/output error")

    monkeypatch.setattr(Syncer, "STEP", 1000)
    monkeypatch.setattr(os, "fdatasync", fail)
    with pytest.raises(CheckpointError, match="input/output error"):
        write(out, one_shard())
    assert not work.exists()


def test_file_size_limit_of_the_system(tmp_path):
    program = """
import resource, sys
from pathlib import Path
from qwen_jax.errors import CheckpointError
from tests.convert.writing.folders import random_arrays, three_shards, write
resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))
try:
    write(Path(sys.argv[1]))
except CheckpointError as error:
    print(error)
"""
    run = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "out"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    assert "File too large" in run.stdout
    assert "2 of 3 shards" in run.stdout
    write(tmp_path / "out", resume=True)
