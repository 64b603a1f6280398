"""What a conversion or an export will do, known before it starts."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import qwen_jax
from qwen_jax.checkpoint.native import RECORD, Record
from qwen_jax.checkpoint.plan import LoadPlan
from qwen_jax.checkpoint.problems import listed, show
from qwen_jax.checkpoint.safetensors_io import TensorFolder
from qwen_jax.errors import CheckpointError

from .inputs import Inputs
from .logical import LogicalFolder
from .outputs import CHUNK_BYTES, released_layout
from .side_files import SETTINGS
from .writing import OutputTensor

# For the estimate of time alone: what a plain solid-state disk reads and writes.
ASSUMED_BYTES_PER_SECOND = 400e6
_BASE_MEMORY = 250e6
_CHUNKS_IN_MEMORY = 10


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A folder to be written, and where everything in it comes from.

    Attributes:
        source: the folder that is read.
        load: where each tensor of the text model comes from.
        tensors: what will be written, in order.
        native: whether a native folder is written, else one in a Hugging Face layout.
        record: what becomes of the model; a native folder keeps it, with checksums.
        before: the record of a native source, else an empty one.
        edited: tree paths of tensors that are changed on the way.
        config: content of the `config.json` to be written.
        side_files: names of files that go along unchanged.
        files_left: names of files that stay behind.
        edit_files: changes the files in the folder written, at the end; None for no change.
        report: makes the content of `quantization_report.json` from what there is to say of the
            tensors written, by key; None for no such file.
        scratch_bytes: bytes of files that lie beside the folder while it is written.
        largest_gather: bytes of the largest tensor that is built in memory as a whole.
        remarks: what edits have to say.
        inputs: the files that it is made from.
        identity: what must be unchanged for a later run to go on with the work of one that was
            interrupted, the state of `inputs` among it; JSON.
    """

    source: Path
    load: LoadPlan
    tensors: Sequence[OutputTensor]
    native: bool
    record: Record
    before: Record
    edited: Collection[str]
    config: Mapping[str, Any]
    side_files: Sequence[str]
    files_left: Sequence[str]
    edit_files: Callable[[Path], None] | None
    report: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
    scratch_bytes: int = 0
    largest_gather: int
    remarks: Sequence[str]
    inputs: Inputs
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
    def now(self) -> Record:
        """What this run does itself, without what was done to a native source before."""
        done, before = self.record, self.before
        return replace(
            done,
            formats=dict(Counter(done.formats) - Counter(before.formats)),
            skipped=dict(Counter(done.skipped) - Counter(before.skipped)),
            adapters=done.adapters[len(before.adapters) :],
            added_tokens=done.added_tokens - before.added_tokens,
        )

    def refuse_damage(self, checksums: Mapping[str, str]) -> None:
        """Raises if tensors that pass unchanged are not those that a native source records.

        Args:
            checksums: of the tensors written, by key.

        Raises:
            CheckpointError: names the tensors.
        """
        unchanged, known = self.unchanged, self.before.checksums
        damaged = [
            key
            for key, checksum in checksums.items()
            if key.removeprefix("model.") in unchanged and known.get(key, checksum) != checksum
        ]
        if damaged:
            raise CheckpointError(
                f"{self.source}: {listed(damaged)} are not what {RECORD} says was written there; "
                "the folder is damaged: convert the original again"
            )

    @property
    def unchanged(self) -> set[str]:
        """Tree paths of tensors that are written with the bytes that they have."""
        written = {tensor.key.removeprefix("model.") for tensor in self.tensors}
        return {source.path for source in self.load.sources} & written - set(self.edited)

    def made(self, folder: Path) -> bool:
        """Whether a finished folder says nothing against having been made by this plan."""
        return True

    @property
    def notes(self) -> tuple[str, ...]:
        """What a person should be told once."""
        return (*self.load.folder.notes, *self.remarks)

    @property
    def seconds(self) -> float:
        """Estimate of the time, at `ASSUMED_BYTES_PER_SECOND`."""
        return (self.bytes_in + self.bytes_out) / ASSUMED_BYTES_PER_SECOND

    def as_json(self) -> dict[str, Any]:
        """The plan as a JSON object, tensors counted only."""
        record = dataclasses.asdict(self.now)
        del record["checksums"], record["files"]
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
            "side_files": [show(name) for name in self.side_files],
            "files_left": [show(name) for name in self.files_left],
            "notes": list(self.notes),
        }


def describe(before: Record, load: LoadPlan, folder: LogicalFolder, *, vision: bool) -> Record:
    """Says what a folder holds and how; what a native one records goes on, so nothing is forgotten.

    Args:
        before: the record of a native folder, else an empty one.
        load: the plan of the folder.
        folder: the folder.
        vision: whether the vision tower goes along.

    Returns:
        The record, without checksums; its layout is the one in which transformers loads the model.
    """
    skipped = {kind: n for kind, n in load.skipped.items() if not (vision and kind == "visual")}
    return replace(
        before,
        layout=released_layout(before.layout, load.config, vision=vision),
        formats=dict(Counter(before.formats) + Counter(folder.format_counts)),
        skipped=dict(Counter(before.skipped) + Counter(skipped) + Counter(folder.skipped)),
        checksums={},
        recipe="",  # what is in codes becomes plain, unless it is quantised now
    )


def gather_inputs(folder: TensorFolder, side_files: Iterable[str]) -> Inputs:
    """Lists the files of a source folder that the result depends on."""
    names = [name for name in SETTINGS if (folder.path / name).exists()]
    return Inputs(
        small={name: folder.path / name for name in (*names, *side_files)},
        large={shard: folder.path / shard for shard in folder.shards},
    )


def identity(folder: TensorFolder, inputs: Inputs, options: Mapping[str, Any]) -> dict:
    """Fingerprints the input of a run, without reading tensors.

    Args:
        folder: the source, whose headers count.
        inputs: the files that the result depends on.
        options: what was asked for.

    Raises:
        CheckpointError: a file cannot be read.
    """
    headers = hashlib.sha256()
    for name in sorted(folder.tensors):
        info = folder.tensors[name]
        headers.update(repr((name, info.shard, info.dtype, info.shape, info.start)).encode())
    found = {
        "version": qwen_jax.__version__,
        "headers": headers.hexdigest(),
        **inputs.state(),
        "options": dict(options),
    }
    return json.loads(json.dumps(found))
