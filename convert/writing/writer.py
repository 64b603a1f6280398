"""Writing a model folder so that it is there whole or not at all.

How that is done is in `work`; this module moves the bytes. They are made, hashed, written and
sent to the disk in four threads, a few pieces of `prefetch.PIECE` bytes apart.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any

from .destination import check_destination, check_room
from .disk import Syncer, write_all
from .hold import open_work
from .prefetch import pieces, prefetch
from .shard import OutputTensor, Shard, lay_out, tensor_bytes
from .work import Finish, WorkFolder

Progress = Callable[[int], None]


@dataclass(frozen=True)
class Written:
    """What `write_folder` did.

    Attributes:
        shards: names of all shards.
        reused: names of those that an earlier run had finished.
        nbytes: bytes of all shards.
        seconds: how long it took.
        checksums: sha256 of each tensor's bytes, by key.
        notes: what a person should be told.
    """

    shards: tuple[str, ...]
    reused: tuple[str, ...]
    nbytes: int
    seconds: float
    checksums: Mapping[str, str]
    notes: tuple[str, ...]


def write_folder(
    destination: Path,
    shards: Sequence[Sequence[OutputTensor]],
    *,
    fingerprint: Mapping[str, Any],
    metadata: Mapping[str, str],
    index_metadata: Mapping[str, Any],
    finish: Finish,
    resume: bool,
    progress: Progress,
    keep: bool = True,
) -> Written:
    """Writes a model folder: shards, index, and what `finish` adds.

    Args:
        destination: the folder; must not exist, or be empty. Missing parents are created.
        shards: the tensors of each shard, as from `plan_shards`.
        fingerprint: what decides the outcome (sources, options, versions), as JSON. A run is
            only continued by one with the same.
        metadata: goes into the header of each shard.
        index_metadata: goes into the index, beside the total size.
        finish: writes config.json and side files into the empty folder that it is given, when
            all shards are complete; also gets the sha256 and the remarks of each tensor by key.
        resume: continue what an earlier run left; begin where there is nothing.
        progress: told by how many bytes of tensors the work has advanced. Less than nothing when
            a shard that seemed finished must be written again.
        keep: whether finished shards stay when this run fails, for one with `resume`.

    Returns:
        What was done.

    Raises:
        CheckpointError: the destination is not usable (see `check_destination`), the work was
            begun by another run or is going on in another process, or the disk is full
            or fails. The message says what is kept, and how to go on.
        RuntimeError: the tensors are not what they were declared to be.
    """
    started = time.monotonic()
    planned = lay_out(shards, metadata)
    nbytes = sum(shard.nbytes for shard in planned)
    place = check_destination(destination, resume=resume, nbytes=nbytes)
    with open_work(place, planned, fingerprint, keep=keep) as work:
        if resume and not (place.begun or place.complete):
            work.notes.append(f"{place.work} did not exist: there was nothing to continue")
        reused = work.reuse(progress)
        if not place.complete:
            check_room(place.work, work.missing_bytes())
            with Syncer() as syncer:
                for shard in work.missing():
                    _write_shard(work, shard, syncer, progress)
                syncer.settle()
            work.publish(index_metadata, finish)
        work.end()
        checksums = work.checksums()
    names = tuple(shard.name for shard in planned)
    return Written(names, reused, nbytes, time.monotonic() - started, checksums, tuple(work.notes))


def _write_shard(work: WorkFolder, shard: Shard, syncer: Syncer, progress: Progress) -> None:
    """Writes one shard; it is synced and named in the background."""
    stream = work.create(shard)
    try:
        checksums = _write_bytes(stream, shard, syncer, progress)
        remarks = {t.key: t.remark() for t in shard.tensors if t.remark is not None}
        syncer.finish(stream, partial(work.complete, shard, checksums, remarks))
    except BaseException:
        # The shard before this one may still be on its way to the disk; it is kept if it gets
        # there.
        with contextlib.suppress(OSError):
            syncer.settle()
        stream.close()
        raise


def _write_bytes(
    stream: FileIO, shard: Shard, syncer: Syncer, progress: Progress
) -> dict[str, str]:
    """Writes header and tensors; gives the checksums of the tensors."""
    digests = {tensor.key: hashlib.sha256() for tensor in shard.tensors}
    hashing: Future[None] | None = None
    write_all(stream, shard.header)
    with (
        ThreadPoolExecutor(1, "sha256") as hasher,
        contextlib.closing(prefetch(_pieces(shard))) as ready,
    ):
        for key, piece in ready:
            if hashing is not None:
                hashing.result()
            hashing = hasher.submit(digests[key].update, piece)
            write_all(stream, piece)
            syncer.written(stream, len(piece))
            progress(len(piece))
    return {key: digest.hexdigest() for key, digest in digests.items()}


def _pieces(shard: Shard) -> Generator[tuple[str, memoryview], None, None]:
    for tensor in shard.tensors:
        for data in tensor_bytes(tensor):
            for piece in pieces(data):
                yield tensor.key, piece
