"""The work folder, in which a model folder is built before it gets its name.

It is `<destination>.partial`, and holds:

- `NAME.writing`, the shard being written; synced, then renamed to NAME, then noted in the
  journal, in that order;
- `finish/`, where side files are made when all shards are there; synced, noted, and moved beside
  the shards, `config.json` last: no reader takes a folder without it for a model.

Then it is renamed to the destination, and the journal removed. So a run that is killed at any
point can be continued, and nothing unfinished ever loads.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Any

from qwen_jax.checkpoint.index import INDEX
from qwen_jax.checkpoint.problems import listed
from qwen_jax.errors import CheckpointError

from .checksums import fault_of_shard
from .destination import Destination, gigabytes
from .disk import create, free_bytes, sync, sync_tree, write_all
from .journal import JOURNAL, FinishedShard, Journal
from .shard import Shard

WRITING = ".writing"
FINISH = "finish"
_CONFIG = "config.json"
_FULL = (errno.ENOSPC, errno.EDQUOT)
_TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)

# Writes side files into the empty folder given, told the checksum of each tensor by key, and what
# there is to say of some of them.
Finish = Callable[[Path, Mapping[str, str], Mapping[str, Any]], None]


class WorkFolder:
    """The work folder of one conversion, held by this process. Make one with `hold.open_work`.

    Attributes:
        planned: all shards.
        notes: what a person should be told.
    """

    def __init__(self, place: Destination, planned: Sequence[Shard], journal: Journal) -> None:
        self.planned = tuple(planned)
        self.notes: list[str] = []
        self._place = place
        self._journal = journal
        self._path = place.path if place.complete else place.work

    @property
    def finished(self) -> Mapping[str, FinishedShard]:
        """The finished shards by name."""
        return self._journal.record.finished

    def missing(self) -> list[Shard]:
        """The shards that are still to be written."""
        return [shard for shard in self.planned if shard.name not in self.finished]

    def missing_bytes(self) -> int:
        """Bytes of the shards that are still to be written."""
        return sum(shard.nbytes for shard in self.missing())

    def checksums(self) -> dict[str, str]:
        """Checksums of the tensors of all finished shards."""
        found: dict[str, str] = {}
        for shard in self.planned:
            if shard.name in self.finished:
                found |= self.finished[shard.name].checksums
        return found

    def remarks(self) -> dict[str, Any]:
        """What is remarked of the tensors of all finished shards."""
        found: dict[str, Any] = {}
        for shard in self.planned:
            if shard.name in self.finished:
                found |= self.finished[shard.name].remarks
        return found

    def reuse(self, progress: Callable[[int], None]) -> tuple[str, ...]:
        """Reads again what an earlier run finished, and drops what is not as it was recorded.

        Returns:
            Names of the shards that are good.

        Raises:
            CheckpointError: a shard is bad, and the folder has its final name already.
        """
        for shard in self.planned:
            if (finished := self.finished.get(shard.name)) is None:
                continue
            fault = fault_of_shard(self._path / shard.name, shard, finished, progress)
            if not fault:
                continue
            if self._place.complete:
                raise CheckpointError(
                    f"{self._path / shard.name} {fault}, although it was finished; delete "
                    f"{self._path} and convert again"
                )
            self.notes.append(f"{shard.name} {fault}, although it was finished; written again")
            del self._journal.record.finished[shard.name]
            remove(self._path / shard.name)
        return tuple(shard.name for shard in self.planned if shard.name in self.finished)

    def create(self, shard: Shard) -> FileIO:
        """Opens the file of a shard for writing."""
        return create(self._writing(shard))

    def complete(
        self, shard: Shard, checksums: Mapping[str, str], remarks: Mapping[str, Any]
    ) -> None:
        """Gives a shard that is on the disk its name, and records it."""
        os.rename(self._writing(shard), self._path / shard.name)
        sync(self._path)
        self._journal.add_shard(shard.name, FinishedShard(shard.nbytes, checksums, remarks))

    def publish(
        self,
        index_metadata: Mapping[str, Any],
        finish: Finish,
    ) -> None:
        """Adds side files and index, and gives the folder its name."""
        staged = self._path / FINISH
        staged.mkdir()
        finish(staged, self.checksums(), self.remarks())
        clashes = {INDEX, JOURNAL, FINISH, *(shard.name for shard in self.planned)}
        if found := sorted(clashes.intersection(os.listdir(staged))):
            raise RuntimeError(f"internal error: side files may not be called {listed(found)}")
        with create(staged / INDEX) as stream:
            write_all(stream, self._index(index_metadata))
        sync_tree(staged)
        names = tuple(sorted(os.listdir(staged), key=_is_not_config, reverse=True))
        self._journal.add_published(names)
        for name in names:
            os.rename(staged / name, self._path / name)
        staged.rmdir()
        sync(self._path)
        os.rename(self._path, self._place.path)
        self._path = self._place.path

    def end(self) -> None:
        """Removes the journal of a folder that has its name."""
        sync(self._path.parent)
        (self._path / JOURNAL).unlink()
        sync(self._path)

    def clear(self) -> None:
        """Removes what an earlier run left, but for finished shards."""
        ours = {FINISH, *self._journal.record.published}
        ours.update(self._writing(shard).name for shard in self.planned)
        ours.update(shard.name for shard in self.missing())
        # The configuration first, as it came last.
        for name in sorted(ours.intersection(os.listdir(self._path)), key=_is_not_config):
            remove(self._path / name)

    def abandon(self, *, keep: bool) -> None:
        """Leaves nothing but what can be continued: journal and finished shards, if any.

        Args:
            keep: whether there will be a run that continues; else nothing is left.
        """
        if self._path != self._place.work:
            return
        with contextlib.suppress(OSError):
            for name in () if keep else self.finished:
                remove(self._path / name)
            self.clear()
            if not (keep and self.finished):
                remove(self._path / JOURNAL)
                self._path.rmdir()

    def failure(self, error: OSError, *, keep: bool) -> CheckpointError:
        """What to tell a person whose disk is full or fails; `keep` as in `abandon`."""
        if error.errno in _TAKEN and not self.missing():
            why = f"{self._place.path} came into being while its model was written ({error})"
        elif error.errno in _FULL:
            why = (
                f"the disk of {self._place.work} is full: {gigabytes(self.missing_bytes())} are "
                f"still to be written, {gigabytes(free_bytes(self._place.work))} are free"
            )
        else:
            why = f"{self._place.work} cannot be written: {error}"
        if not keep:
            return CheckpointError(f"{why}. Nothing is kept")
        if not self.finished:
            return CheckpointError(f"{why}. No shard was finished, so nothing is kept")
        kept = gigabytes(sum(shard.nbytes for shard in self.finished.values()))
        return CheckpointError(
            f"{why}. {len(self.finished)} of {len(self.planned)} shards ({kept}) are finished and "
            "kept. Put that right and repeat the command with --resume to go on, or delete "
            f"{self._place.work} to give up"
        )

    def _writing(self, shard: Shard) -> Path:
        return self._path / (shard.name + WRITING)

    def _index(self, metadata: Mapping[str, Any]) -> bytes:
        placed = {tensor.key: shard.name for shard in self.planned for tensor in shard.tensors}
        total = sum(shard.data_bytes for shard in self.planned)
        index = {
            "metadata": {"total_size": total, **metadata},
            "weight_map": dict(sorted(placed.items())),
        }
        return json.dumps(index, indent=2, ensure_ascii=False).encode() + b"\n"


def _is_not_config(name: str) -> bool:
    return name != _CONFIG


def remove(path: Path) -> None:
    """Removes a file, a link, or a folder with everything in it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
