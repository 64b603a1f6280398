"""Where a folder is to be written, and whether that is possible; looked at before any work."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from qwen_jax.checkpoint.index import INDEX
from qwen_jax.checkpoint.problems import listed
from qwen_jax.errors import CheckpointError

from .disk import existing_parent, free_bytes
from .journal import JOURNAL, being_written, is_locked, read_journal

SUFFIX = ".partial"
# Room for what lies beside the shards (tokenizer files, index, journal) and for the file system.
SLACK = 64 << 20


@dataclass(frozen=True)
class Destination:
    """A usable destination.

    Attributes:
        path: the folder to be written, absolute.
        work: the folder beside it in which it is built.
        begun: whether `work` exists already.
        complete: whether `path` itself exists, written to its end but for the removal of the
            journal; then there is no `work`.
    """

    path: Path
    work: Path
    begun: bool
    complete: bool


def check_destination(destination: Path, *, resume: bool, nbytes: int) -> Destination:
    """Finds out whether a folder can be written; changes nothing.

    Args:
        destination: the folder to be written; it must not exist, or be empty.
        resume: whether to continue what an earlier run left.
        nbytes: bytes of all shards; what an earlier run left is subtracted here.

    Returns:
        Where to write.

    Raises:
        CheckpointError: something is there already, another process is writing it, the place
            cannot be written to, or has too little room.
    """
    path = destination.absolute()
    # A folder above may be a link, as where models are kept on another disk.
    path = path.parent.resolve() / path.name
    if path.name in ("", ".."):
        raise CheckpointError(f"{destination} is not a name for a new folder; give one")
    work = partial_folder(path)
    try:
        complete = resume and _is_complete(path)
        if not complete:
            _check_absent(path, resume)
            _check_work(work, resume)
        begun = not complete and work.exists()
        _check_parent(existing_parent(path))
        if not complete:
            finished = read_journal(work).finished.values() if begun else ()
            check_room(work, nbytes - sum(shard.nbytes for shard in finished))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error}") from error
    return Destination(path, work, begun, complete)


def partial_folder(destination: Path) -> Path:
    """The folder beside a destination in which it is built."""
    return destination.with_name(destination.name + SUFFIX)


def is_finished(destination: Path) -> bool:
    """Whether a destination is a model folder that was written to its end."""
    files = (destination / name for name in (INDEX, "config.json"))
    return all(file.is_file() for file in files) and not (destination / JOURNAL).exists()


def check_room(work: Path, nbytes: int) -> None:
    """Refuses to begin what cannot fit.

    Args:
        work: the work folder, which need not exist.
        nbytes: bytes of shards that are still to be written.

    Raises:
        CheckpointError: there is too little room.
    """
    free = free_bytes(work)
    if free < nbytes + SLACK:
        raise CheckpointError(
            f"{work.parent} has {gigabytes(free)} free; {gigabytes(nbytes)} are still to be "
            f"written, and {gigabytes(SLACK)} are kept for side files. Free "
            f"{gigabytes(nbytes + SLACK - free)}, or give a destination on another disk"
        )


def gigabytes(nbytes: int) -> str:
    """Bytes for a reader, such as "12.34 GB"."""
    return f"{nbytes / 1e9:,.2f} GB"


def _is_complete(path: Path) -> bool:
    """Whether a run was stopped between the renaming and the removal of the journal."""
    return path.is_dir() and not path.is_symlink() and bool(read_journal(path).published)


def _check_absent(path: Path, resume: bool) -> None:
    if path.is_symlink():
        raise CheckpointError(
            f"{path} is a symbolic link to {os.readlink(path)}; give the folder it should lead to"
        )
    if not path.exists():
        return
    if not path.is_dir():
        raise CheckpointError(f"{path} is a file; give the name of a new folder")
    if held := sorted(os.listdir(path)):
        hint = "; --resume removes its journal" if JOURNAL in held and not resume else ""
        raise CheckpointError(
            f"{path} exists and holds {listed(held)}{hint}. Nothing is ever overwritten: give "
            "another destination, or delete that folder"
        )
    if path.is_mount():
        raise CheckpointError(
            f"{path} is where a disk is mounted, which cannot be replaced by a finished folder; "
            f"give a new folder in it, such as {path / 'model'}"
        )


def _check_work(work: Path, resume: bool) -> None:
    if work.is_symlink() or (work.exists() and not work.is_dir()):
        kind = "a symbolic link" if work.is_symlink() else "a file"
        raise CheckpointError(
            f"{work} is {kind}; a folder of that name is needed to work in: delete it, or give "
            "another destination"
        )
    if not work.exists():
        return
    if is_locked(work):
        raise being_written(work)
    if not resume:
        raise CheckpointError(
            f"{work} exists, left by a run that did not finish. Continue it with --resume "
            "(distill cannot be continued), or delete that folder"
        )


def _check_parent(parent: Path) -> None:
    if not parent.is_dir():
        raise CheckpointError(f"{parent} is not a folder, so nothing can be written in it")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise CheckpointError(f"{parent} may not be written to; give another destination")
