"""What a conversion or an export will do, known before it starts."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qwen_jax.checkpoint.native import Record, read_record
from qwen_jax.checkpoint.plan import LoadPlan
from qwen_jax.checkpoint.safetensors_io import TensorFolder

from .logical import LogicalFolder
from .outputs import CHUNK_BYTES, released_layout
from .writing import OutputTensor

# For the estimate of time alone: what a plain solid-state disk reads and writes.
ASSUMED_BYTES_PER_SECOND = 400e6
_BASE_MEMORY = 250e6
_CHUNKS_IN_MEMORY = 6


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A folder to be written, and where everything in it comes from.

    Attributes:
        source: the folder that is read.
        load: where each tensor of the text model comes from.
        tensors: what will be written, in order.
        native: whether a native folder is written, else one in a Hugging Face layout.
        record: what becomes of the model; a native folder keeps it, with checksums.
        config: content of the `config.json` to be written.
        side_files: names of files that go along unchanged.
        files_left: names of files that stay behind.
        edit_files: changes the files in the folder written, at the end; None for no change.
        largest_gather: bytes of the largest tensor that is built in memory as a whole.
        remarks: what edits have to say.
        identity: what must be unchanged for a later run to go on with the work of one that was
            interrupted; JSON.
    """

    source: Path
    load: LoadPlan
    tensors: Sequence[OutputTensor]
    native: bool
    record: Record
    config: Mapping[str, Any]
    side_files: Sequence[str]
    files_left: Sequence[str]
    edit_files: Callable[[Path], None] | None
    largest_gather: int
    remarks: Sequence[str]
    identity: Mapping[str, Any]

    @property
    def bytes_in(self) -> int:
        """Bytes of the folder's tensors, those that stay behind included."""
        return self.load.folder.nbytes

    @property
    def bytes_out(self) -> int:
        """Bytes of the tensors that will be written."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def peak_memory(self) -> int:
        """Estimate of the bytes of host memory that the run takes, mapped files not counted."""
        return int(_BASE_MEMORY + _CHUNKS_IN_MEMORY * max(CHUNK_BYTES, self.largest_gather))

    @property
    def notes(self) -> tuple[str, ...]:
        """What a person should be told once."""
        return (*self.load.notes, *self.remarks)

    @property
    def seconds(self) -> float:
        """Estimate of the time, at `ASSUMED_BYTES_PER_SECOND`."""
        return (self.bytes_in + self.bytes_out) / ASSUMED_BYTES_PER_SECOND

    def as_json(self) -> dict[str, Any]:
        """The plan as a JSON object, tensors counted only."""
        record = dataclasses.asdict(self.record)
        del record["checksums"]
        return {
            "source": str(self.source),
            "model_type": self.load.config.model_type,
            "format": "native" if self.native else "hugging face",
            "tensors_in": len(self.load.folder.tensors),
            "tensors_out": len(self.tensors),
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
            "peak_memory_bytes": self.peak_memory,
            "seconds": self.seconds,
            **record,
            "side_files": list(self.side_files),
            "files_left": list(self.files_left),
            "notes": list(self.notes),
        }


def describe(load: LoadPlan, folder: LogicalFolder, *, vision: bool) -> Record:
    """Says what a folder holds and how; what a native one records goes on, so nothing is forgotten.

    Args:
        load: the plan of the folder.
        folder: the folder.
        vision: whether the vision tower goes along.

    Returns:
        The record, without checksums; its layout is the one in which transformers loads the model.
    """
    before = read_record(folder.path) or Record(layout=load.layout)
    return replace(
        before,
        layout=released_layout(before.layout, load.config, vision=vision),
        formats=dict(Counter(before.formats) + Counter(folder.format_counts)),
        skipped=dict(Counter(before.skipped) + Counter(load.skipped) + Counter(folder.skipped)),
        checksums={},
    )


def identity(folder: TensorFolder, files: Iterable[Path], options: Mapping[str, Any]) -> dict:
    """Fingerprints the input of a run, without reading tensors.

    Args:
        folder: the source: its headers count, and size and time of change of its shards.
        files: small files that the result depends on; their content counts.
        options: what was asked for.
    """
    headers = hashlib.sha256()
    for name in sorted(folder.tensors):
        info = folder.tensors[name]
        headers.update(repr((name, info.shard, info.dtype, info.shape, info.start)).encode())
    shards = {}
    for shard in folder.shards:
        state = (folder.path / shard).stat()
        shards[shard] = [state.st_size, state.st_mtime_ns]
    contents = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    return json.loads(
        json.dumps(
            {
                "headers": headers.hexdigest(),
                "shards": shards,
                "files": contents,
                "options": dict(options),
            }
        )
    )
