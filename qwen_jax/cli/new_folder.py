"""A folder of results that appears complete, or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from ..errors import RequestError


def refuse_taken(folder: Path, flag: str) -> None:
    """Raise `RequestError` unless a new folder can be made there; an empty one may stand there."""
    if folder.name in ("", ".."):
        raise RequestError(f"{flag} {folder} is not a name for a new folder; give one")
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise RequestError(f"{flag} {folder} is not a folder; give the name of a new one")
    if folder.exists() and any(folder.iterdir()):
        raise RequestError(
            f"{flag} {folder} exists and is not empty, and nothing is overwritten; give another "
            "name, or delete it"
        )
    if not folder.parent.is_dir():
        raise RequestError(f"{flag} {folder}: {folder.parent} is not a folder; make it first")
    if not os.access(folder.parent, os.W_OK | os.X_OK):
        raise RequestError(f"{flag} {folder}: {folder.parent} may not be written to; give another")


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder beside it to write into, which gets its name when everything is written.

    Raises:
        OSError: it cannot be made or renamed.
    """
    work = folder.with_name(f".{folder.name}.{os.getpid()}")
    work.mkdir()
    try:
        yield work
        work.rename(folder)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
