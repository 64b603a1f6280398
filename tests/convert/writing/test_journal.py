"""Journals: torn, damaged, of another conversion, held by another process."""

from __future__ import annotations

import fcntl
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from qwen_jax.errors import CheckpointError
from tests.convert.writing.folders import (
    SHARDS,
    contents,
    failing,
    interrupt,
    random_arrays,
    three_shards,
    undisturbed,
    write,
)


def test_torn_end_of_the_journal_is_dropped_and_never_written_onto(out, work):
    interrupt(out)
    left = contents(work)
    journal = left.pop("journal.jsonl")
    ends = [end + 1 for end, byte in enumerate(journal) if byte == ord("\n")]
    assert len(ends) == 3
    for end in sorted({*range(0, len(journal), 60), *ends, *(end - 1 for end in ends)}):
        shutil.rmtree(out, ignore_errors=True)
        work.mkdir(exist_ok=True)
        for name, content in left.items():
            (work / name).write_bytes(content)
        (work / "journal.jsonl").write_bytes(journal[:end])
        written = write(out, resume=True)
        assert written.reused == SHARDS[: max(sum(line <= end for line in ends) - 1, 0)]
        assert contents(out) == undisturbed()


@pytest.mark.parametrize("junk", [b"\0" * 40 + b"\n", b"[1]\n", b'{"shard": 3}\n', b"\xff\n"])
def test_journal_that_is_damaged_inside_counts_up_to_there(out, work, junk):
    interrupt(out)
    lines = (work / "journal.jsonl").read_bytes().splitlines(keepends=True)
    (work / "journal.jsonl").write_bytes(b"".join([*lines[:2], junk, *lines[2:]]))
    assert write(out, resume=True).reused == SHARDS[:1]
    assert contents(out) == undisturbed()


def test_journal_of_another_conversion_is_refused(out, work):
    interrupt(out)
    before = contents(work)
    with pytest.raises(CheckpointError) as raised:
        write(out, resume=True, fingerprint={"source": "y", "options": {"experts": "fused"}})
    told = str(raised.value)
    assert 'source: "x" then, "y" now' in told
    assert 'options.experts: absent then, "fused" now' in told
    assert f"delete {work}" in told
    assert contents(work) == before


def test_fingerprint_may_hold_tuples(out):
    with pytest.raises(CheckpointError, match="damaged"):
        write(out, failing(CheckpointError("damaged")), fingerprint={"files": ("a", "b")})
    write(out, resume=True, fingerprint={"files": ("a", "b")})
    assert contents(out) == undisturbed()


def test_other_shards_under_the_same_fingerprint_are_refused(out):
    interrupt(out)
    with pytest.raises(CheckpointError, match="the tensors planned for the shards"):
        write(out, three_shards(random_arrays())[:2], resume=True)


def test_journal_of_another_version_is_refused(out, work):
    interrupt(out)
    journal = (work / "journal.jsonl").read_text()
    (work / "journal.jsonl").write_text(journal.replace("journal 2", "journal 3"))
    with pytest.raises(CheckpointError, match="has format qwen-jax conversion journal 3"):
        write(out, resume=True)


def test_files_of_somebody_else_are_refused_and_left_alone(out, work):
    work.mkdir()
    (work / "thesis.tex").write_text("x")
    with pytest.raises(CheckpointError, match=r"did not write: thesis\.tex"):
        write(out, resume=True)
    assert contents(work) == {"thesis.tex": b"x"}
    (work / "thesis.tex").unlink()
    work.rmdir()
    interrupt(out)
    (work / "thesis.tex").write_text("x")
    before = contents(work)
    with pytest.raises(CheckpointError, match=r"did not write: thesis\.tex"):
        write(out, resume=True)
    assert contents(work) == before


def test_links_in_the_work_folder_are_not_followed(out, work, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("x")
    interrupt(out)
    (work / "finish").symlink_to(outside)
    (work / (SHARDS[2] + ".writing")).symlink_to(outside / "precious")
    with (work / "journal.jsonl").open("a") as journal:
        journal.write(json.dumps({"published": ["../outside", "/etc", ".."]}) + "\n")
    write(out, resume=True)
    assert contents(out) == undisturbed()
    assert contents(outside) == {"precious": b"x"}

    shutil.rmtree(out)
    work.mkdir()
    (work / "journal.jsonl").symlink_to(outside / "precious")
    with pytest.raises(CheckpointError, match="cannot be"):
        write(out, resume=True)
    assert contents(outside) == {"precious": b"x"}


def test_second_writer_is_refused(out, work):
    interrupt(out)
    program = (
        "import fcntl, sys; f = open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_EX)\n"
        "print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", program, str(work / "journal.jsonl")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        for resume in (False, True):
            with pytest.raises(CheckpointError, match="being written by another process"):
                write(out, resume=resume)
    write(out, resume=True)
    assert contents(out) == undisturbed()


def test_lock_is_held_to_the_end(out, work):
    def locked(folder: Path) -> bool:
        with (folder / "journal.jsonl").open() as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    states = []

    def look(folder: Path, checksums: object, remarks: object) -> None:
        states.append(locked(work))

    write(out, progress=lambda nbytes: states.append(locked(work)), finish=look)
    assert states
    assert all(states)
