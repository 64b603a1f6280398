"""A folder of which every tensor looks like a plain one, whatever quantised it is stored in."""

from __future__ import annotations

import copy
import os
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar

import numpy as np

from qwen_jax.checkpoint.header import TensorInfo
from qwen_jax.checkpoint.problems import Problems
from qwen_jax.checkpoint.safetensors_io import EVERY_ROW, TensorFolder, open_folder

from .formats import Found, Quantised, find_matrices, read_settings
from .formats.quantised import BFLOAT16


class LogicalFolder(TensorFolder):
    """The tensors of one folder, quantised ones as bfloat16. Make one with `open_logical`.

    Attributes:
        path: the folder.
        tensors: what each tensor is, by key. A quantised matrix is there once, under the key of
            the plain one, with dtype BF16; `shard`, `start` and `stop` are those of its largest
            part.
        shards: names of the files, relative to `path`.
        notes: what a person should be told once.
        parts: keys in the files of the tensors that hold each quantised matrix, by logical key.
        format_counts: number of matrices by format.
        skipped: number of tensors that no weight needs, by kind.
    """

    dequantises: ClassVar[bool] = True

    def __init__(self, folder: TensorFolder, found: Found) -> None:
        matrices = found.matrices
        logical = {key: _plain_info(folder, matrix) for key, matrix in matrices.items()}
        counts = Counter(matrix.format for matrix in matrices.values())
        self._folder = folder
        self._matrices: Mapping[str, Quantised] = MappingProxyType(matrices)
        self.parts: Mapping[str, tuple[str, ...]] = MappingProxyType(
            {key: matrix.parts for key, matrix in matrices.items()}
        )
        self.format_counts: Mapping[str, int] = MappingProxyType(dict(counts))
        self.skipped: Mapping[str, int] = MappingProxyType(dict(found.skipped))
        super().__init__(folder.path, {**found.plain, **logical}, folder.notes)
        self.shards = folder.shards

    @property
    def nbytes(self) -> int:
        """Bytes in the files of all tensors together, quantised ones as they are stored."""
        return sum(self.physical_bytes(key) for key in self.tensors)

    def physical_bytes(self, key: str) -> int:
        """Bytes in the files that hold one tensor, with all parts of a quantised matrix."""
        stored = self._folder.tensors
        return sum(stored[part].nbytes for part in self.parts.get(key, (key,)))

    def read(self, name: str, rows: slice = EVERY_ROW) -> np.ndarray:
        """Gives one tensor, or some entries of its first axis.

        Args:
            name: logical key, as in `tensors`.
            rows: which part of the first axis (output features, or experts of a stack), without
                a step; only that part is dequantised.

        Returns:
            bfloat16 of its own for a quantised matrix; for any other tensor a read-only view as
            `TensorFolder.read` gives it.

        Raises:
            CheckpointError: no such tensor, a file that has changed since it was opened, or
                scales, zero points or group numbers that make no sense.
        """
        matrix = self._matrices.get(name)
        if matrix is None:
            return self._folder.read(name, rows)
        start, stop, _ = rows.indices(matrix.shape[0])
        if start >= stop:
            return np.empty((0, *matrix.shape[1:]), BFLOAT16)
        return matrix.read(self._folder, start, stop)

    def release(self, name: str, rows: slice = EVERY_ROW) -> None:
        """Lets the system take back the memory of what was read; see `TensorFolder.release`."""
        if name not in self._matrices:
            self._folder.release(name, rows)
        for part in self.parts.get(name, ()):
            self._folder.release(part)

    def zero_biases(self) -> frozenset[str]:
        """Finds the biases that packers add to modules without one.

        Returns:
            Keys `<module>.bias` next to a quantised `<module>.weight` that hold nothing but
            zeros. They are in `tensors`; leaving them out changes nothing.
        """
        keys = (key.removesuffix("weight") + "bias" for key in self.parts if key.endswith("weight"))
        return frozenset(key for key in keys if key in self.tensors and not self.read(key).any())

    def without(self, keys: Collection[str], kind: str) -> LogicalFolder:
        """Leaves tensors out.

        Args:
            keys: keys of tensors.
            kind: what they are, in the singular, for `skipped`.

        Returns:
            The folder without them; itself if there are none.
        """
        if not keys:
            return self
        rest = copy.copy(self)
        kept = {key: info for key, info in self.tensors.items() if key not in keys}
        rest.tensors = MappingProxyType(kept)
        rest.skipped = MappingProxyType({**self.skipped, kind: len(keys)})
        return rest


def _plain_info(folder: TensorFolder, matrix: Quantised) -> TensorInfo:
    """Describes a quantised matrix as the plain one that it stands for."""
    main = folder.tensors[matrix.parts[0]]
    return replace(main, name=matrix.key, dtype="BF16", shape=matrix.shape)


def open_logical(path: str | os.PathLike[str]) -> LogicalFolder:
    """Opens a folder of safetensors files, quantised or not.

    Args:
        path: the folder; see `open_folder` for its files.

    Returns:
        The folder. Only headers, the configuration and the shapes of packed matrices were read.

    Raises:
        CheckpointError: what `open_folder` refuses; weights of a quantised format that is not
            read; or configuration fields and tensors that make no sense, all in one error.
    """
    folder = open_folder(path)
    problems = Problems()
    found = find_matrices(folder, problems)
    _refuse(folder.path, problems)
    return LogicalFolder(folder, found)


def refuse_unread(path: Path) -> None:
    """Raises if a configuration tells that its weights, which need not be there, are not read.

    Args:
        path: the folder.

    Raises:
        CheckpointError: weights of a quantised format that is not read, or fields of the
            configuration that are not understood.
    """
    problems = Problems()
    read_settings(path, (), problems)
    _refuse(path, problems)


def _refuse(path: Path, problems: Problems) -> None:
    problems.raise_if_any(
        f"{path} holds quantised weights that cannot be read",
        "Every part of a quantised matrix must be there once and fit the others, and every field "
        "of the configuration must be known. Check that config.json and the weights are of one "
        "release, and complete.",
    )
