"""Checksums of tensors as they lie on the disk: sha256 of each one's bytes, by key."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Literal

from qwen_jax.checkpoint.problems import show
from qwen_jax.checkpoint.safetensors_io import open_folder
from qwen_jax.errors import CheckpointError

from .disk import no_link
from .journal import FinishedShard
from .prefetch import PIECE, prefetch
from .shard import Shard


@dataclass(frozen=True)
class Mismatch:
    """One tensor that is not as its checksum says.

    Attributes:
        kind: in the checksums only ("missing"), in the folder only ("extra"), or "different".
        key: name of the tensor.
    """

    kind: Literal["missing", "extra", "different"]
    key: str

    def __str__(self) -> str:
        return f"{show(self.key)}: {self.kind}"


def verify_folder(
    folder: Path, checksums: Mapping[str, str], progress: Callable[[int], None]
) -> list[Mismatch]:
    """Reads every tensor of a folder again and compares checksums.

    Args:
        folder: a model folder.
        checksums: sha256 by key, in hexadecimal digits.
        progress: told how many bytes have been read since it was last called.

    Returns:
        What does not fit, missing tensors first, then extra, then different ones; empty if all
        is well.

    Raises:
        CheckpointError: the folder cannot be opened, or a file of it cannot be read.
    """
    tensors = open_folder(folder).tensors
    faults = [Mismatch("missing", key) for key in sorted(checksums.keys() - tensors.keys())]
    faults += [Mismatch("extra", key) for key in sorted(tensors.keys() - checksums.keys())]
    by_shard: dict[str, dict[str, tuple[int, int]]] = {}
    for key, info in sorted(tensors.items(), key=lambda item: item[1].start):
        by_shard.setdefault(info.shard, {})[key] = (info.start, info.stop)
    for shard, ranges in sorted(by_shard.items()):
        try:
            with FileIO(folder / shard) as stream:
                found = _hash(stream, ranges, progress)
        except OSError as error:
            raise CheckpointError(f"{show(shard)} cannot be read: {error}") from error
        wrong = (key for key in found if checksums.get(key, found[key]) != found[key])
        faults += [Mismatch("different", key) for key in wrong]
    return faults


def fault_of_shard(
    file: Path, shard: Shard, finished: FinishedShard, progress: Callable[[int], None]
) -> str:
    """Says what is wrong with a shard that an earlier run finished; "" if nothing is.

    Args:
        file: where it is.
        shard: what it should be.
        finished: what was recorded of it.
        progress: told how many bytes have been read since it was last called; told the whole
            sum, negative, if the shard turns out to be bad.
    """
    read = 0

    def count(nbytes: int) -> None:
        nonlocal read
        read += nbytes
        progress(nbytes)

    fault = _fault(file, shard, finished, count)
    if fault:
        progress(-read)
    return fault


def _fault(
    file: Path, shard: Shard, finished: FinishedShard, progress: Callable[[int], None]
) -> str:
    try:
        with FileIO(file, opener=no_link) as stream:
            size = os.fstat(stream.fileno()).st_size
            if not size == shard.nbytes == finished.nbytes:
                return f"has {size} bytes instead of {shard.nbytes}"
            if os.pread(stream.fileno(), len(shard.header), 0) != shard.header:
                return "has another header"
            found = _hash(stream, shard.ranges(), progress)
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    wrong = [key for key, digest in found.items() if finished.checksums.get(key) != digest]
    return f"has tensor {show(wrong[0])} with another checksum" if wrong else ""


def _hash(
    stream: FileIO, ranges: Mapping[str, tuple[int, int]], progress: Callable[[int], None]
) -> dict[str, str]:
    """Hashes ranges of bytes of an open file."""
    digests = {key: hashlib.sha256() for key in ranges}
    with contextlib.closing(prefetch(_read(stream, ranges))) as reading:
        for key, data in reading:
            digests[key].update(data)
            progress(len(data))
    return {key: digest.hexdigest() for key, digest in digests.items()}


def _read(
    stream: FileIO, ranges: Mapping[str, tuple[int, int]]
) -> Generator[tuple[str, bytes], None, None]:
    """Yields the bytes of each range in pieces; a range beyond the end of the file is cut."""
    for key, (start, stop) in ranges.items():
        while start < stop and (data := os.pread(stream.fileno(), min(PIECE, stop - start), start)):
            yield key, data
            start += len(data)
