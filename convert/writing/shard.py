"""What is to be written: tensors that make their bytes when asked, and the shards that hold them.

Format of a shard: https://huggingface.co/docs/safetensors/index#format
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from qwen_jax.checkpoint.header import DTYPES
from qwen_jax.checkpoint.problems import listed, show
from qwen_jax.errors import CheckpointError, RequestError

DATA_ALIGNMENT = 4096  # a page, so that the data of a mapped shard begin at a page
_OFFSETS = "data_offsets"


@dataclass(frozen=True)
class OutputTensor:
    """One tensor of the folder to be written.

    Attributes:
        key: its name in the file.
        dtype: its dtype as safetensors spells it, such as "BF16"; one of
            `qwen_jax.checkpoint.header.DTYPES`.
        shape: its shape.
        chunks: yields C-contiguous arrays of that dtype (or uint8) whose bytes, one after the
            other, are the tensor in row-major order. Called in a thread other than the caller's,
            some chunks ahead of the writing, so an array must not change after it was yielded.
        part: what it belongs to, such as a layer; tensors of two parts never share a shard.
        remark: what there is to say of it once its chunks were made, as JSON; the journal keeps
            it.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    chunks: Callable[[], Iterator[np.ndarray]]
    part: str = ""
    remark: Callable[[], Any] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that the tensor takes in the file."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class Shard:
    """One file to be written.

    Attributes:
        name: its file name.
        header: everything in front of the data, the length field included.
        tensors: its tensors in the order in which their data follow one another.
    """

    name: str
    header: bytes
    tensors: tuple[OutputTensor, ...]

    @property
    def data_bytes(self) -> int:
        """Bytes of its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return len(self.header) + self.data_bytes

    def ranges(self) -> dict[str, tuple[int, int]]:
        """Where each tensor lies in the file: first byte and the one after its last."""
        return dict(_ranges(self.tensors, len(self.header)))


def plan_shards(
    tensors: Iterable[OutputTensor], max_bytes: int
) -> tuple[tuple[OutputTensor, ...], ...]:
    """Groups whole tensors, in their order, into shards of one part each.

    Args:
        tensors: what is to be written.
        max_bytes: bytes of tensors that a shard may hold; a tensor larger than that gets a shard
            to itself.

    Returns:
        The tensors of each shard.

    Raises:
        RequestError: `max_bytes` is not positive.
    """
    if max_bytes <= 0:
        raise RequestError(f"shards of {max_bytes} bytes: give a positive number of bytes")
    shards: list[list[OutputTensor]] = []
    room = -1
    for tensor in tensors:
        if not shards or tensor.nbytes > room or tensor.part != shards[-1][-1].part:
            shards.append([])
            room = max_bytes
        shards[-1].append(tensor)
        room -= tensor.nbytes
    return tuple(map(tuple, shards))


def lay_out(
    groups: Sequence[Sequence[OutputTensor]], metadata: Mapping[str, str]
) -> tuple[Shard, ...]:
    """Names the shards and writes their headers.

    Within a shard, tensors of wider dtypes come first: then each lies at a multiple of its
    item size, without which some readers refuse it. Otherwise the order given is kept.

    Args:
        groups: the tensors of each shard.
        metadata: goes into the header of every shard.

    Returns:
        The shards, named `model-00001-of-00041.safetensors` and so on.

    Raises:
        RuntimeError: no shards, a shard without tensors, a key given twice, or an unknown dtype;
            these are mistakes of the calling code.
    """
    keys = Counter(tensor.key for group in groups for tensor in group)
    twice = [key for key, count in keys.items() if count > 1]
    unknown = {tensor.dtype for group in groups for tensor in group} - DTYPES.keys()
    if twice or unknown or not groups or not all(groups):
        raise RuntimeError(
            f"internal error in the plan of {len(groups)} shards: keys given twice: "
            f"{listed(twice) or 'none'}; dtypes not known: {listed(sorted(unknown)) or 'none'}; "
            f"empty shards: {sum(not group for group in groups)}"
        )
    shards = []
    for number, group in enumerate(groups, 1):
        tensors = tuple(sorted(group, key=lambda t: -DTYPES[t.dtype].itemsize))
        name = f"model-{number:05}-of-{len(groups):05}.safetensors"
        shards.append(Shard(name, _header(tensors, metadata), tensors))
    return tuple(shards)


def plan_digest(shards: Sequence[Shard]) -> str:
    """A checksum of what the shards are called and what is to be in them, values left out."""
    digest = hashlib.sha256()
    for shard in shards:
        digest.update(shard.name.encode() + b"\n" + shard.header)
    return digest.hexdigest()


def tensor_bytes(tensor: OutputTensor) -> Iterator[memoryview]:
    """Yields the bytes of a tensor, chunk by chunk, without copying them.

    Args:
        tensor: what is to be written.

    Raises:
        CheckpointError: what the chunks are made from cannot be read.
        RuntimeError: the chunks are not what the tensor was declared to be; a mistake of the
            code that made them.
    """
    given = 0
    try:
        for chunk in tensor.chunks():
            _check_chunk(tensor, chunk)
            given += chunk.nbytes
            if chunk.nbytes:
                # bfloat16 and float8 have no buffer format of their own; as bytes they do.
                yield chunk.reshape(-1).view(np.uint8).data
    except OSError as error:
        raise CheckpointError(f"tensor {show(tensor.key)} cannot be made: {error}") from error
    if given != tensor.nbytes:
        raise RuntimeError(
            f"internal error: the chunks of tensor {show(tensor.key)} have {given} bytes, "
            f"{tensor.dtype} of shape {list(tensor.shape)} has {tensor.nbytes}"
        )


def _check_chunk(tensor: OutputTensor, chunk: np.ndarray) -> None:
    if chunk.dtype not in (DTYPES[tensor.dtype], np.uint8) or not chunk.flags.c_contiguous:
        raise RuntimeError(
            f"internal error: tensor {show(tensor.key)} of {tensor.dtype} was given a chunk of "
            f"{chunk.dtype} with strides {chunk.strides}; chunks must have the tensor's dtype "
            "and be C-contiguous"
        )


def _header(tensors: Sequence[OutputTensor], metadata: Mapping[str, str]) -> bytes:
    """Length field and JSON, padded with spaces up to the alignment of the data."""
    entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    ranges = dict(_ranges(tensors, 0))
    for tensor in tensors:
        entries[tensor.key] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            _OFFSETS: list(ranges[tensor.key]),
        }
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    length = math.ceil((8 + len(text)) / DATA_ALIGNMENT) * DATA_ALIGNMENT - 8
    return length.to_bytes(8, "little") + text.ljust(length)


def _ranges(tensors: Sequence[OutputTensor], start: int) -> Iterator[tuple[str, tuple[int, int]]]:
    for tensor in tensors:
        yield tensor.key, (start, start + tensor.nbytes)
        start += tensor.nbytes
