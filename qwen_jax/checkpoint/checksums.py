"""Checksums: of tensors, compared in threads while they are loaded, and of files beside them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Event

from ..errors import CheckpointError
from .header import TensorInfo
from .json_file import read_object
from .native import RECORD, Record, read_record
from .problems import listed, show
from .safetensors_io import TensorFolder

# Beside names of files: what config.json says of codes, however it is spaced and ordered.
QUANTIZATION = "quantization_config of config.json"

_THREADS = 8
_PIECE = 4 << 20


@contextlib.contextmanager
def compared(folder: TensorFolder, keys: Sequence[str]) -> Iterator[None]:
    """Compares tensors with the checksums in the folder's record while the block runs.

    Files are read beside the block, in pieces that are hashed and forgotten. Every tensor has been
    compared when the block ends, and before it begins what the record tells of files beside them.

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
    refuse_changed_files(folder.path, record)
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


def file_checksums(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """SHA-256 of files of a folder, as hexadecimal digits; "" for one that is not there.

    Args:
        folder: any model folder.
        names: of the files, or `QUANTIZATION`.

    Raises:
        CheckpointError: a file cannot be read.
    """
    return {name: _digest_of_file(folder, name) for name in names}


def refuse_changed_files(folder: Path, record: Record) -> None:
    """Compares the files that a record tells of.

    Raises:
        CheckpointError: one has another content, is gone, or cannot be read.
    """
    found = file_checksums(folder, record.files)
    changed = [name for name, digest in found.items() if digest != record.files[name]]
    if changed:
        raise CheckpointError(
            f"{folder}: not what {RECORD} says was written there: {listed(changed)}; fetch the "
            "folder again, all from one revision. What was changed on purpose is accepted when its "
            f'line is taken out of "files" in {RECORD}'
        )


def _digest_of_file(folder: Path, name: str) -> str:
    if name == QUANTIZATION:
        details = read_object(folder / "config.json").get("quantization_config")
        return hashlib.sha256(json.dumps(details, sort_keys=True).encode()).hexdigest()
    try:
        with open(folder / name, "rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise CheckpointError(f"{show(folder / name)} cannot be read: {error.strerror}") from error


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
