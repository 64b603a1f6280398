"""Checksums of tensors, compared in threads while the tensors are loaded."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event

from ..errors import CheckpointError
from .header import TensorInfo
from .native import RECORD, read_record
from .problems import listed, show
from .safetensors_io import TensorFolder

_THREADS = 8
_PIECE = 4 << 20


@contextlib.contextmanager
def compared(folder: TensorFolder, keys: Sequence[str]) -> Iterator[None]:
    """Compares tensors with the checksums in the folder's record while the block runs.

    Files are read beside the block, in pieces that are hashed and forgotten. Every tensor has been
    compared when the block ends.

    Args:
        folder: a native folder.
        keys: the tensors.

    Raises:
        CheckpointError: the record is missing or damaged, lacks a tensor, or tells of another
            content.
    """
    record = read_record(folder.path)
    if record is None:
        raise CheckpointError(
            f"{folder.path} has no {RECORD}, which holds the checksums of its tensors; fetch it "
            "with the rest of the folder"
        )
    unknown = [key for key in keys if key not in record.checksums]
    if unknown:
        raise CheckpointError(
            f"{folder.path / RECORD} has no checksum of {listed(unknown)}; fetch it with the rest "
            "of the folder, all from one revision"
        )
    stop = Event()
    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1), "sha256") as pool:
        digests: dict[str, Future[str]] = {
            key: pool.submit(_digest, folder, folder.tensors[key], stop) for key in keys
        }
        try:
            yield
            wrong = [key for key, d in digests.items() if d.result() != record.checksums[key]]
        finally:
            stop.set()
    if wrong:
        raise CheckpointError(
            f"{folder.path}: {listed(wrong)} are not what {RECORD} says was written there; the "
            "folder is damaged: fetch it again, or quantise the original again"
        )


def _digest(folder: TensorFolder, info: TensorInfo, stop: Event) -> str:
    digest, start = hashlib.sha256(), info.start
    try:
        with open(folder.path / info.shard, "rb", buffering=0) as stream:
            while start < info.stop and not stop.is_set():
                data = os.pread(stream.fileno(), min(_PIECE, info.stop - start), start)
                if not data:
                    break  # cut short: another checksum
                digest.update(data)
                start += len(data)
    except OSError as error:
        raise CheckpointError(f"{show(info.shard)} cannot be read: {error}") from error
    return digest.hexdigest()
