"""A model folder opened for reading: what it holds, and each tensor as a NumPy array.

Which files belong to the model is decided by the index when there is one; a shard is
memory-mapped, so that opening costs the headers only and reading a tensor copies nothing.

A path in the index must stay inside the folder as written. A shard that is a symbolic link is
followed wherever it leads, since the Hugging Face cache is built of links from snapshots to
blobs.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar

import numpy as np

from ..errors import CheckpointError
from .formats import refuse_other_files
from .header import DTYPES, TensorInfo, read_header
from .index import INDEX, read_index
from .problems import Problems, listed, show

SINGLE = "model.safetensors"
EVERY_ROW = slice(None)


class TensorFolder:
    """The tensors of one folder. Make one with `open_folder`.

    Attributes:
        path: the folder.
        tensors: what each tensor is, by key; nothing of the data has been read.
        shards: names of the files that hold them, relative to `path`.
        notes: what a person should be told once, such as files that were ignored.
        dequantises: whether quantised matrices look like plain ones here; the files as they are
            do not.
    """

    dequantises: ClassVar[bool] = False

    def __init__(self, path: Path, tensors: dict[str, TensorInfo], notes: tuple[str, ...]) -> None:
        self.path = path
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(tensors)
        self.shards = tuple(sorted({info.shard for info in tensors.values()}))
        self.notes = notes
        self._maps: dict[str, mmap.mmap] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(info.nbytes for info in self.tensors.values())

    def read(self, name: str, rows: slice = EVERY_ROW) -> np.ndarray:
        """Gives one tensor as a read-only view of the mapped file, at an address of any alignment.

        Args:
            name: key of the tensor, as in `tensors`.
            rows: which part of its first axis; a scalar has none.

        Returns:
            An array of the dtype in the file (bfloat16 and float8 as `ml_dtypes` has them), and,
            with all rows, of the shape there.

        Raises:
            CheckpointError: no such tensor, a dtype that NumPy cannot hold, or a file that has
                changed since it was opened.
        """
        info = self.tensors.get(name)
        if info is None:
            raise CheckpointError(f"{self.path} holds no tensor {show(name)}")
        dtype = DTYPES.get(info.dtype)
        if dtype is None:
            raise CheckpointError(
                f"{show(info.shard)}: tensor {show(name)} has dtype {show(info.dtype)}; "
                f"dtypes that can be read are {', '.join(DTYPES)}"
            )
        raw = self._bytes(info)
        try:
            tensor = raw.view(dtype).reshape(info.shape)
        except ValueError as error:  # too many axes, or sizes that are too large even beside a 0
            text = f"tensor {show(name)} has shape {show(list(info.shape))}: {error}"
            raise CheckpointError(f"{show(info.shard)}: {text}") from error
        return tensor[rows] if info.shape else tensor

    def _bytes(self, info: TensorInfo) -> np.ndarray:
        if info.nbytes == 0:
            return np.empty(0, np.uint8)
        mapped = self._map(info.shard)
        # The present size: to touch a page behind it would end the process.
        if info.stop > min(mapped.size(), len(mapped)):
            raise CheckpointError(
                f"{show(info.shard)}: the file has been cut short since it was opened"
            )
        return np.frombuffer(mapped, np.uint8)[info.start : info.stop]

    def release(self, name: str, rows: slice = EVERY_ROW) -> None:
        """Lets the system take back the memory of what was read; reading it again still works.

        Pages of a mapped file stay in the process until memory is short. They do no harm there,
        but look as if the whole file were held.

        Args:
            name: key of the tensor.
            rows: which part of its first axis.
        """
        info = self.tensors[name]
        if info.shard not in self._maps or not info.nbytes:
            return
        length = info.shape[0] if info.shape else 1
        start, stop, _ = rows.indices(length)
        row = info.nbytes // length
        first = (info.start + start * row) // mmap.PAGESIZE * mmap.PAGESIZE
        self._maps[info.shard].madvise(mmap.MADV_DONTNEED, first, info.start + stop * row - first)

    def _map(self, shard: str) -> mmap.mmap:
        if shard not in self._maps:
            try:
                with (self.path / shard).open("rb") as stream:
                    self._maps[shard] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
            except (OSError, ValueError) as error:
                raise CheckpointError(f"{show(shard)}: {error}") from error
        return self._maps[shard]


def open_folder(path: str | os.PathLike[str]) -> TensorFolder:
    """Opens a folder of safetensors files in the Hugging Face layout.

    Accepted are `model.safetensors.index.json` with its shards, else `model.safetensors`, else
    exactly one `*.safetensors`. Other safetensors files in the folder are ignored and named in
    `notes`.

    Args:
        path: the folder.

    Returns:
        The opened folder; only headers have been read.

    Raises:
        CheckpointError: no such folder, no weights or weights of another format, a path that
            leaves the folder, a missing, truncated or damaged shard, or an index that disagrees
            with the shards. All faults of a kind are in one error.
    """
    path = Path(path)
    if not path.is_dir():
        kind = "is not a folder" if path.exists() else "does not exist"
        raise CheckpointError(
            f"{path} {kind}; give the folder that holds config.json and the weights"
        )
    index = path / INDEX
    placed = read_index(index) if os.path.lexists(index) else None
    shards = _single_shard(path) if placed is None else sorted(set(placed.values()))
    _check_present(path, shards, placed)
    tensors = _read_shards(path, shards, placed)
    if not tensors:
        raise CheckpointError(f"{path} holds no tensors: {listed(shards)} has an empty header")
    present = {p.name for p in path.glob("*.safetensors")}
    strays = sorted(present - set(shards))
    why = f"{INDEX} does not list" if placed is not None else f"are not {shards[0]}"
    notes = (f"ignored files that {why}: {listed(strays)}",) if strays else ()
    return TensorFolder(path, tensors, notes)


def _single_shard(path: Path) -> list[str]:
    """Picks the one file of a folder without an index."""
    files = sorted(p.name for p in path.glob("*.safetensors"))
    if SINGLE in files or len(files) == 1:
        return [SINGLE] if SINGLE in files else files
    if not files:
        refuse_other_files(path)
        raise CheckpointError(
            f"{path} holds no *.safetensors; expected {INDEX} with its shards, or {SINGLE}"
        )
    raise CheckpointError(
        f"{path} holds {len(files)} safetensors files and no {INDEX}: {listed(files)}; "
        "fetch the index, or leave one file"
    )


def _check_present(path: Path, shards: list[str], placed: Mapping[str, str] | None) -> None:
    problems = Problems()
    for shard in shards:
        file = path / shard
        try:
            if file.is_file():
                continue
        except OSError as error:  # a name that no file system has
            problems.add("shards", f"{show(shard)}: {error.strerror}")
            continue
        held = sum(place == shard for place in placed.values()) if placed else 0
        holds = f", which holds {held} of {len(placed)} tensors" if placed else ""
        absent = "a symbolic link that leads nowhere" if file.is_symlink() else "missing"
        why = "not a regular file" if file.exists() else absent
        problems.add("shards", f"{show(shard)}{holds}: {why}")
    problems.raise_if_any(
        f"{path} lacks files that its weights need",
        "Download the folder again; a download that was interrupted leaves shards out.",
    )


def _read_shards(
    path: Path, shards: list[str], placed: Mapping[str, str] | None
) -> dict[str, TensorInfo]:
    """Reads every header, and holds the index against what the shards have."""
    problems, tensors = Problems(), {}
    lacking = dict(placed or {})
    for shard in shards:
        try:
            header = read_header(path / shard, shard)
        except CheckpointError as error:
            problems.add("unreadable", str(error))
            lacking = {name: place for name, place in lacking.items() if place != shard}
            continue
        for name, info in header.items():
            place = shard if placed is None else placed.get(name)
            if place == shard:
                tensors[name] = info
                lacking.pop(name, None)
            elif place is None:
                problems.add("not in the index", f"{show(name)} (in {show(shard)})")
            else:
                where = f"{show(name)} is in {show(shard)}, the index says {show(place)}"
                problems.add("in another shard than the index says, or in two", where)
    for name, place in lacking.items():
        problems.add("in the index only", f"{show(name)} (not in {show(place)})")
    agree = f", or do not agree with {INDEX}" if placed else ""
    problems.raise_if_any(
        f"{path}: the weights are damaged{agree}",
        "Download the files named above again, all from one revision.",
    )
    return tensors
