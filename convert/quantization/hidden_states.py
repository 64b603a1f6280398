"""The residual stream between two layers, kept on the disk so that a run can go on from there."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np

from qwen_jax.checkpoint.json_file import without_duplicates
from qwen_jax.errors import CheckpointError

from ..writing.disk import sync

SUFFIX = ".calibration"
# The newest, and as many before it as layers may be on their way to the disk.
KEPT = 3

_NAME = "hidden-{:05}.bin"
_LONGEST = 1 << 16


class StateFolder:
    """Hidden states beside a destination, one file a layer; the last few are kept.

    A file is a line of JSON, with a checksum, and the array. It gets its name when it is complete.
    One that is damaged, or of another run, counts as missing.

    Args:
        destination: the folder that is being written.
        identity: of the run, as JSON.
    """

    def __init__(self, destination: Path, identity: Any) -> None:
        self.path = destination.with_name(destination.name + SUFFIX)
        text = json.dumps(identity, sort_keys=True)
        self._run = hashlib.sha256(text.encode()).hexdigest()

    def save(self, layer: int, hidden: np.ndarray) -> None:
        """Keeps what goes into a layer, and drops what older layers were given.

        Args:
            layer: its number.
            hidden: float32 [N, T, D].

        Raises:
            CheckpointError: the disk is full or fails.
        """
        header = {
            "run": self._run,
            "layer": layer,
            "shape": hidden.shape,
            "sha256": _digest(hidden),
        }
        file = self._file(layer)
        writing = file.with_suffix(".writing")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with writing.open("wb") as stream:
                stream.write(json.dumps(header).encode() + b"\n")
                stream.write(_bytes(hidden))
                stream.flush()
                os.fsync(stream.fileno())
            os.rename(writing, file)
            sync(self.path)
            for old in self._files()[:-KEPT]:
                old.unlink()
        except OSError as error:
            raise CheckpointError(
                f"{file} cannot be written: {error}. Put that right and repeat the command with "
                "--resume to go on"
            ) from error

    def load(self, layer: int) -> np.ndarray | None:
        """What goes into a layer; None if it is not there, damaged, or of another run."""
        try:
            with self._file(layer).open("rb") as stream:
                header = json.loads(stream.readline(_LONGEST), object_pairs_hook=without_duplicates)
                run, number = header["run"], header["layer"]
                shape, digest = tuple(header["shape"]), header["sha256"]
                if (run, number) != (self._run, layer):
                    return None
                hidden = _read(stream, shape)
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return hidden if _digest(hidden) == digest else None

    def clear(self) -> None:
        """Removes the files of any run, and the folder if nothing else is in it."""
        with contextlib.suppress(OSError):
            for file in (*self._files(), *self.path.glob("hidden-?????.writing")):
                file.unlink()
            self.path.rmdir()

    def _file(self, layer: int) -> Path:
        return self.path / _NAME.format(layer)

    def _files(self) -> list[Path]:
        return sorted(self.path.glob("hidden-?????.bin"))


def _bytes(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array, np.float32).reshape(-1).view(np.uint8).data


def _digest(hidden: np.ndarray) -> str:
    return hashlib.sha256(_bytes(hidden)).hexdigest()


def _read(stream: Any, shape: tuple[int, ...]) -> np.ndarray:
    left = os.fstat(stream.fileno()).st_size - stream.tell()
    if math.prod(shape) * 4 != left:
        raise ValueError("of another length")
    array = np.empty(shape, np.float32)
    if stream.readinto(_bytes(array)) != array.nbytes:
        raise ValueError("cut short")
    return array
