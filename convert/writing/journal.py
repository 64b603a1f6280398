"""The journal of a conversion: what it is, and which shards are finished.

`journal.jsonl` lies in the work folder. Its first line says what is being converted; each further
line is added, and synced, after the shard that it names is complete on the disk. An end that was
cut off by a crash is dropped when the journal is opened again. Whoever has the journal open holds
a lock on it, so that two processes never write one folder.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any

from qwen_jax.checkpoint.problems import Problems, show
from qwen_jax.errors import CheckpointError

from .disk import no_link, write_all

JOURNAL = "journal.jsonl"
_FORMAT = "qwen-jax conversion journal 2"
_LOCK_NOT_KNOWN = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)


@dataclass(frozen=True)
class FinishedShard:
    """One finished shard.

    Attributes:
        nbytes: size of the file.
        checksums: sha256 of each tensor's bytes by key.
        remarks: JSON by key, of tensors of which there is something to say.
    """

    nbytes: int
    checksums: Mapping[str, str]
    remarks: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Record:
    """What a journal says.

    Attributes:
        opening: its first line; None if there is none.
        finished: the shards that are complete, by file name.
        published: names of the other entries of the work folder, which were moved there when all
            shards were complete; empty until then.
        readable: bytes up to the first damaged line.
    """

    opening: dict[str, Any] | None = None
    finished: dict[str, FinishedShard] = field(default_factory=dict)
    published: tuple[str, ...] = ()
    readable: int = 0

    def take(self, line: bytes) -> bool:
        """Takes over one line; says whether it could be read."""
        try:
            entry = json.loads(line) if line.endswith(b"\n") else None
        except (ValueError, RecursionError):
            entry = None
        match entry:
            case dict() if self.opening is None:
                self.opening = entry
            case {
                "shard": str(name),
                "bytes": int(nbytes),
                "sha256": dict(checksums),
                "remarks": dict(remarks),
            }:
                self.finished[name] = FinishedShard(nbytes, checksums, remarks)
            case {"published": list(names)}:
                self.published = tuple(map(str, names))
            case _:
                return False
        self.readable += len(line)
        return True


class Journal:
    """An open, locked journal. Make one with `open_journal`.

    Attributes:
        record: what it says.
    """

    def __init__(self, stream: FileIO, record: Record) -> None:
        self._stream = stream
        self.record = record

    def add_shard(self, name: str, shard: FinishedShard) -> None:
        """Records a shard that is complete on the disk."""
        entry = {"shard": name, "bytes": shard.nbytes, "sha256": dict(shard.checksums)}
        self.append({**entry, "remarks": dict(shard.remarks)})

    def add_published(self, names: tuple[str, ...]) -> None:
        """Records what is about to be moved into the work folder beside the shards."""
        self.append({"published": list(names)})

    def append(self, entry: Mapping[str, Any]) -> None:
        """Adds a line and makes it durable."""
        line = json.dumps(entry).encode() + b"\n"
        write_all(self._stream, line)
        os.fsync(self._stream.fileno())
        self.record.take(line)

    def close(self) -> None:
        """Gives the lock back."""
        self._stream.close()


def open_journal(folder: Path, fingerprint: Mapping[str, Any], plan: str) -> Journal:
    """Opens the journal of a work folder, begins one where there is none, and locks it.

    Args:
        folder: the work folder.
        fingerprint: what is being converted and how, as JSON; an earlier run must have had the
            same.
        plan: checksum of the planned shards, likewise.

    Raises:
        CheckpointError: another process holds it, or it is that of another conversion.
        OSError: it cannot be opened or written.
    """
    file = folder / JOURNAL
    # Through JSON, so that tuples and lists compare equal.
    opening = json.loads(json.dumps({"format": _FORMAT, "fingerprint": fingerprint, "plan": plan}))
    stream = FileIO(file, "a+", opener=no_link)
    try:
        _lock(stream, file)
        stream.seek(0)
        content = stream.readall() or b""
        record = _parse(content)
        if record.opening is not None:
            _check_opening(record.opening, opening, folder)
        if record.readable < len(content):
            os.ftruncate(stream.fileno(), record.readable)
        journal = Journal(stream, record)
        if record.opening is None:
            journal.append(opening)
    except BaseException:
        stream.close()
        raise
    return journal


def read_journal(folder: Path) -> Record:
    """What the journal of a work folder says; takes no lock. An empty record if there is none."""
    try:
        with FileIO(folder / JOURNAL, opener=no_link) as stream:
            return _parse(stream.readall() or b"")
    except FileNotFoundError:
        return Record()


def is_locked(folder: Path) -> bool:
    """Whether a process is writing the work folder now."""
    try:
        with FileIO(folder / JOURNAL, opener=no_link) as stream:
            fcntl.flock(stream.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def being_written(folder: Path) -> CheckpointError:
    """The error for a work folder that another process is writing."""
    return CheckpointError(
        f"{folder} is being written by another process; wait until that has ended, or give another "
        "destination"
    )


def _parse(content: bytes) -> Record:
    record = Record()
    for line in content.splitlines(keepends=True):
        if not record.take(line):
            break
    return record


def _lock(stream: FileIO, file: Path) -> None:
    try:
        fcntl.flock(stream.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise being_written(file.parent) from error
    except OSError as error:
        if error.errno not in _LOCK_NOT_KNOWN:  # some network file systems have no locks
            raise
    try:
        same = os.path.samestat(os.fstat(stream.fileno()), os.lstat(file))
    except FileNotFoundError:
        same = False
    if not same:  # the process that held the lock finished between our opening and locking
        raise being_written(file.parent)


def _check_opening(found: dict[str, Any], wanted: dict[str, Any], folder: Path) -> None:
    """Refuses to continue what was begun as something else."""
    if found.get("format") != _FORMAT:
        raise CheckpointError(
            f"{folder / JOURNAL} has format {show(found.get('format'))}; only {_FORMAT!r} can be "
            f"continued. Delete {folder} to start anew"
        )
    problems = Problems()
    then, now = _flat(found.get("fingerprint")), _flat(wanted["fingerprint"])
    for name in sorted(then.keys() | now.keys()):
        before, after = (side.get(name, "absent") for side in (then, now))
        if before != after:
            problems.add("differing", f"{show(name)}: {show(before)} then, {show(after)} now")
    if then == now and found.get("plan") != wanted["plan"]:
        problems.add("differing", "the tensors planned for the shards")
    problems.raise_if_any(
        f"{folder} was begun by another run, which this one cannot continue",
        f"Repeat the command as it was then, or delete {folder} to start anew.",
    )


def _flat(value: Any, name: str = "") -> dict[str, str]:
    """Leaves of nested objects as JSON, by dotted name."""
    if not isinstance(value, dict):
        return {name: json.dumps(value)}
    leaves: dict[str, str] = {}
    for key, item in value.items():
        leaves |= _flat(item, f"{name}.{key}" if name else key)
    return leaves
