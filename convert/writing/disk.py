"""The disk: writing all of it, making it durable, and how much room there is."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from io import FileIO
from pathlib import Path
from typing import Any


def create(file: Path) -> FileIO:
    """Opens a new file for writing; follows no link and replaces nothing."""
    return FileIO(file, "x")


def no_link(path: str, flags: int) -> int:
    """An opener that refuses symbolic links, and does not wait for the other end of a pipe."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)


def write_all(stream: FileIO, data: memoryview | bytes) -> None:
    """Writes all bytes: one call of the system may write fewer than it was given."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(stream.fileno(), rest) :]


def sync(path: Path) -> None:
    """Makes a file's data, or the entries of a folder, survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """`sync` for a folder and everything in it; links are left alone."""
    for parent, _, files in os.walk(folder, topdown=False):
        for name in files:
            if not (Path(parent) / name).is_symlink():
                sync(Path(parent) / name)
        sync(Path(parent))


def existing_parent(path: Path) -> Path:
    """The nearest folder above a path that exists."""
    return next(parent for parent in path.parents if os.path.lexists(parent))


def free_bytes(path: Path) -> int:
    """Bytes that may still be written where `path` is or will be."""
    return shutil.disk_usage(path if path.exists() else existing_parent(path)).free


class Syncer:
    """Sends written data to the disk from a thread of its own, one request at a time.

    Errors of the disk are raised by the next call of any method.
    """

    STEP = 256 << 20  # bytes written between two requests

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "sync")
        self._last: Future[Any] | None = None
        self._written = 0

    def __enter__(self) -> Syncer:
        return self

    def __exit__(self, *raised: object) -> None:
        self._thread.shutdown()

    def written(self, stream: FileIO, nbytes: int) -> None:
        """Notes that so much was written; now and then has it sent to the disk.

        The system alone would begin late, and then hold up the writing process.
        """
        self._written += nbytes
        if self._written >= self.STEP and (self._last is None or self._last.done()):
            self._submit(_flush, stream)
            self._written = 0

    def finish(self, stream: FileIO, then: Callable[[], None]) -> None:
        """Syncs and closes a file, then calls `then`, all in the background."""
        self._submit(_close, stream, then)

    def settle(self) -> None:
        """Waits until everything asked for is done."""
        last, self._last = self._last, None
        if last is not None:
            last.result()

    def _submit(self, task: Callable[..., None], *arguments: Any) -> None:
        # Also looks at the last result: the system reports an error of a file only once.
        self.settle()
        self._last = self._thread.submit(task, *arguments)


def _flush(stream: FileIO) -> None:
    os.fdatasync(stream.fileno())
    _forget(stream)


def _close(stream: FileIO, then: Callable[[], None]) -> None:
    with stream:
        os.fsync(stream.fileno())
        _forget(stream)
    then()


def _forget(stream: FileIO) -> None:
    """Lets the system drop what is on the disk already, rather than other programs' files."""
    os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
