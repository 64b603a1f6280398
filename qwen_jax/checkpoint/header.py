"""The header of one safetensors file: its tensors, their shapes, and where their bytes lie.

The `safetensors` package is the judge of a header: it bounds the header's length, and checks that
offsets fit shapes and that the tensors cover the data without gap or overlap. It neither gives
offsets away nor names the tensor at fault, and it takes a name that appears twice; this module
adds those three. Format: https://huggingface.co/docs/safetensors/index#format
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from ..errors import CheckpointError
from .json_file import LONGEST, without_duplicates
from .native import VERSION_KEY, refuse_other_version
from .problems import show

DTYPES: dict[str, np.dtype] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}

_LONGEST_EXPLAINED = 10_000_000  # of a bad header; as Python objects it takes many times that
_LARGEST = 2**63
_LFS_POINTER = b"version https://git-lfs"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor as the header describes it; `start` and `stop` are byte offsets in the file."""

    name: str
    shard: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Bytes that the tensor takes in the file."""
        return self.stop - self.start


def read_header(file: Path, shard: str) -> dict[str, TensorInfo]:
    """Reads which tensors a safetensors file holds, without reading the tensors.

    Args:
        file: the file.
        shard: its name inside the model folder, for messages and for `TensorInfo.shard`.

    Returns:
        The tensors by name, in the order of the header.

    Raises:
        CheckpointError: the file cannot be read, is truncated, or its header is malformed; names
            file and tensor.
    """
    try:
        with safe_open(file, framework="numpy"):
            pass
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{show(shard)}: {error}{_explanation(file)}") from error
    try:
        entries, data_start, _ = _parse(file)
    except (ValueError, RecursionError, OSError) as error:
        raise CheckpointError(f"{show(shard)}: {error}") from error
    tensors = {}
    for name, entry in entries.items():
        begin, end = entry["data_offsets"]
        shape = tuple(entry["shape"])
        tensors[name] = TensorInfo(
            name, shard, entry["dtype"], shape, data_start + begin, data_start + end
        )
    return tensors


def _parse(file: Path, longest: int = LONGEST) -> tuple[dict[str, Any], int, int]:
    """Returns entries, offset of the data and number of data bytes; reads a bounded amount."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 0 < length <= min(size - 8, longest):
            raise CheckpointError(f"header length {length} does not fit a file of {size} bytes")
        header = json.loads(stream.read(length), object_pairs_hook=without_duplicates)
    if not isinstance(header, dict):
        raise CheckpointError("the header is not a JSON object")
    metadata = header.pop("__metadata__", None)
    if isinstance(metadata, dict):
        refuse_other_version(metadata.get(VERSION_KEY))
    return header, 8 + length, size - 8 - length


def _explanation(file: Path) -> str:
    """Says which tensors made the package refuse a file, where that can be found out."""
    try:
        with file.open("rb") as stream:
            if stream.read(len(_LFS_POINTER)) == _LFS_POINTER:
                return "; it is a Git LFS pointer, not the file: fetch that with `git lfs pull`"
        entries, _, data_bytes = _parse(file, _LONGEST_EXPLAINED)
        faults = [
            f"tensor {show(n)} {f}" for n, e in entries.items() if (f := _fault(e, data_bytes))
        ]
        faults = faults or _misplaced(entries, data_bytes)
    except (ValueError, RecursionError, OSError) as error:
        return f" ({error})" if isinstance(error, CheckpointError) else ""
    return "; " + "; ".join(faults[:3]) if faults else ""


def _fault(entry: Any, data_bytes: int) -> str | None:
    """Says what is wrong with one header entry taken alone."""
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        return "has no object with dtype, shape and data_offsets"
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not _counts(shape):
        return f"has shape {show(shape)}, which is not a list of sizes"
    if not _counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        return f"has data_offsets {show(offsets)}, which are not [begin, end]"
    if offsets[1] > data_bytes:
        return (
            f"ends at byte {show(offsets[1])} of the data, of which the file has {data_bytes}: "
            "the file is truncated or damaged, so download it again"
        )
    if not isinstance(dtype, str) or dtype not in DTYPES:
        return f"has dtype {show(dtype)}, whose size is not known here"
    needed = _size(shape, DTYPES[dtype].itemsize)
    if needed != offsets[1] - offsets[0]:
        return (
            f"has shape {show(shape)} of {dtype} = {needed} bytes, "
            f"but data_offsets {show(offsets)} = {offsets[1] - offsets[0]} bytes"
        )
    return None


def _size(shape: list[int], itemsize: int) -> int | str:
    """Bytes of a tensor; the product of millions of sizes would take hours, so it is cut off."""
    needed = 0 if 0 in shape else itemsize
    for extent in shape:
        needed *= extent
        if needed > _LARGEST:
            return "too many"
    return needed


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _misplaced(entries: dict[str, Any], data_bytes: int) -> list[str]:
    """Names tensors that overlap or leave a gap, given that each fits the file by itself."""
    faults, end, before = [], 0, "the start of the data"
    for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
        begin, stop = entry["data_offsets"]
        if begin != end:
            relation = "overlaps" if begin < end else f"leaves a gap of {begin - end} bytes after"
            faults.append(f"tensor {show(name)} {relation} {before}")
        end, before = stop, f"tensor {show(name)}"
    if end < data_bytes:
        faults.append(f"{data_bytes - end} bytes follow {before}, the last one")
    return faults
