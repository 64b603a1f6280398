"""Taking hold of a work folder: one process, one run, and nothing in it that is not a run's own."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from qwen_jax.checkpoint.problems import listed
from qwen_jax.errors import CheckpointError

from .destination import Destination
from .disk import sync
from .journal import JOURNAL, Journal, being_written, open_journal
from .shard import Shard, plan_digest
from .work import FINISH, WRITING, WorkFolder, remove


@contextlib.contextmanager
def open_work(
    place: Destination, planned: Sequence[Shard], fingerprint: Mapping[str, Any], *, keep: bool
) -> Iterator[WorkFolder]:
    """Takes hold of a work folder for as long as the block lasts; makes it if there is none.

    When the block fails, finished shards and the journal stay if `keep` says so; without any,
    nothing does.

    Raises:
        CheckpointError: another process has it, it was begun by another run, it holds
            files that no conversion wrote, or the disk fails, here or in the block.
    """
    made: list[Path] = []
    try:
        if not (place.begun or place.complete):
            _make_folders(place, made)
        with contextlib.closing(_take_journal(place, planned, fingerprint)) as journal:
            work = WorkFolder(place, planned, journal)
            try:
                if place.begun:
                    work.clear()
                yield work
            except BaseException as error:
                work.abandon(keep=keep)
                if isinstance(error, OSError):
                    raise work.failure(error, keep=keep) from error
                raise
    except BaseException as error:
        for path in reversed(made):
            with contextlib.suppress(OSError):
                path.rmdir()
        if isinstance(error, OSError):
            raise CheckpointError(f"{place.work} cannot be made: {error}") from error
        raise


def _make_folders(place: Destination, made: list[Path]) -> None:
    """Makes the work folder and the parents that it lacks; adds to `made` what it makes."""
    lacking = [path for path in place.work.parents if not path.exists()]
    try:
        for path in (*reversed(lacking), place.work):
            path.mkdir(exist_ok=path != place.work)
            made.append(path)
            sync(path.parent)
    except FileExistsError as error:
        raise being_written(place.work) from error


def _take_journal(
    place: Destination, planned: Sequence[Shard], fingerprint: Mapping[str, Any]
) -> Journal:
    """Opens and locks the journal of a folder in which nothing is but a conversion's files."""
    folder = place.path if place.complete else place.work
    new = not os.path.lexists(folder / JOURNAL)
    if new:
        _refuse_strays(folder, planned, ())
    try:
        journal = open_journal(folder, fingerprint, plan_digest(planned))
    except OSError:
        if new:
            remove(folder / JOURNAL)
        raise
    try:
        _refuse_strays(folder, planned, journal.record.published)
    except BaseException:
        journal.close()
        raise
    return journal


def _refuse_strays(folder: Path, planned: Sequence[Shard], published: Sequence[str]) -> None:
    known = {JOURNAL, FINISH, *published, *(shard.name for shard in planned)}
    known.update(shard.name + WRITING for shard in planned)
    if strays := sorted(set(os.listdir(folder)) - known):
        raise CheckpointError(
            f"{folder} holds what this run did not write: {listed(strays)}. Move that "
            "elsewhere, or delete the whole folder to start anew"
        )
