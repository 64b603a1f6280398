"""An adapter folder, as a change of tree tensors on their way."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from qwen_jax.checkpoint.header import read_header
from qwen_jax.checkpoint.problems import Problems, listed, show
from qwen_jax.checkpoint.safetensors_io import TensorFolder
from qwen_jax.errors import CheckpointError

from .changes import Change, changed
from .inputs import Inputs
from .keys import parse_adapter_key
from .matching import Changes, known_tensors, match
from .settings import CONFIG, read_settings

if TYPE_CHECKING:
    from qwen_jax.config import QwenConfig

WEIGHTS = "adapter_model.safetensors"
PICKLE = "adapter_model.bin"

_DTYPES = ("F32", "BF16", "F16")
_LAYER = re.compile(r"^layers\.\d+\.")


class Adapter:
    """A LoRA adapter of PEFT. Make one with `load_adapter`.

    Attributes:
        paths: tree paths of the tensors that it changes.
        summary: what it changes, in a line.
        identity: what tells it from another adapter, or from a later state of it; JSON.
        notes: what a person should be told once.
        vision: number of its tensors that are for the vision tower, and are left out.
    """

    def __init__(
        self,
        folder: TensorFolder,
        changes: Changes,
        shapes: Mapping[str, tuple[int, ...]],
        notes: tuple[str, ...],
        vision: int,
    ) -> None:
        self._changes = changes
        self._shapes = shapes
        self.paths: Collection[str] = frozenset(changes)
        kinds = Counter(_LAYER.sub("", path) for path in changes)
        parts = (f"{count} {kind.removesuffix('.weight')}" for kind, count in kinds.items())
        self.summary = f"{show(folder.path.resolve().name)}: {', '.join(parts)}"
        self.identity = _identity(folder)
        self.notes = notes
        self.vision = vision

    def shape(self, path: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape afterwards, which is the same."""
        return shape

    def apply(self, path: str, start: int, rows: np.ndarray) -> np.ndarray:
        """The changed run of rows: added up in float32, then rounded once.

        Args:
            path: tree path.
            start: number of the first row.
            rows: the run; never altered.

        Returns:
            An array of the same shape and dtype.

        Raises:
            CheckpointError: a value does not fit the dtype, or the adapter holds one that is not
                finite.
        """
        changes = self._changes.get(path)
        if changes is None:
            return rows
        if None in changes:
            return changed(path, rows, start, changes[None])
        result = rows.copy()
        for i in range(len(rows)):
            of_expert: list[Change] = changes.get(start + i, [])
            if of_expert:
                result[i] = changed(path, rows[i], 0, of_expert)
        return result

    def extra_rows(self, path: str, dtype: np.dtype) -> np.ndarray:
        """The rows added at the end: none."""
        return np.empty((0, *self._shapes[path][1:]), dtype)


def load_adapter(folder: Path, config: QwenConfig) -> Adapter:
    """Opens an adapter folder, as PEFT's `save_pretrained` writes it.

    Merged are LoRA updates of any matrix of the text model (of fused experts too), tensors saved
    as a whole (`modules_to_save`) and single rows of the embedding (`trainable_token_indices`).
    Tensors of the vision tower are left out and counted.

    Args:
        folder: holds `adapter_config.json` and `adapter_model.safetensors`.
        config: the model that it is merged into, as the weights have it: `tie_word_embeddings`
            is false where there is an output head of its own.

    Returns:
        The adapter; headers have been read, and of tensors at most those of a tied head.

    Raises:
        CheckpointError: the files are missing or damaged, the adapter is of another kind, changes
            nothing of the model, or has settings or tensors that are not understood or do not
            fit. All of them are in one error.
    """
    problems = Problems()
    settings = read_settings(folder, problems)
    tensors = _open(folder)
    keys = [parse_adapter_key(key) for key in tensors.tensors]
    problems.add("not understood", *(show(key.key) for key in keys if key.role == "unknown"))
    for key, info in tensors.tensors.items():
        if info.dtype not in _DTYPES:
            text = f"{show(key)} is {show(info.dtype)}; accepted: {', '.join(_DTYPES)}"
            problems.add("dtype", text)
    text_keys = [key for key in keys if key.role not in ("visual", "unknown")]
    known = known_tensors(config)
    changes = match(
        Inputs(tensors, settings, known, problems),
        text_keys,
        tied=config.tie_word_embeddings,
    )
    if not text_keys:
        problems.add("no tensor of the text model", f"{WEIGHTS} has {len(keys)} tensors")
    problems.raise_if_any(
        f"{folder} cannot be merged into this model "
        f"({config.model_type}, {config.num_hidden_layers} layers)",
        "Every tensor of the adapter must belong to the model, and every setting be understood. "
        "Check that base_model_name_or_path in its adapter_config.json is this model, or merge it "
        "with PEFT and convert the result.",
    )
    visual = sum(key.role == "visual" for key in keys)
    left_out = (f"left out {visual} tensors of the vision tower",) if visual else ()
    shapes = {path: known[path].shape for path in changes}
    return Adapter(tensors, changes, shapes, (*settings.notes, *left_out), visual)


def _open(folder: Path) -> TensorFolder:
    file = folder / WEIGHTS
    if file.is_file():
        return TensorFolder(folder, read_header(file, WEIGHTS), ())
    if (folder / PICKLE).exists():
        raise CheckpointError(
            f"{folder} holds {PICKLE}, a PyTorch pickle, which can run code and is not read. "
            f"Only {WEIGHTS} is: load the adapter with PEFT and save it again"
        )
    others = sorted(path.name for path in folder.glob("*.safetensors"))
    there = f"; it has {listed(others)}, which PEFT would not read either" if others else ""
    raise CheckpointError(f"{folder} has no {WEIGHTS}{there}")


def _identity(folder: TensorFolder) -> dict[str, Any]:
    """Settings and headers count, and size and time of change of the file of tensors."""
    state = (folder.path / WEIGHTS).stat()
    headers = repr([(info.name, info.dtype, info.shape) for info in folder.tensors.values()])
    content = (folder.path / CONFIG).read_bytes() + headers.encode()
    return {
        "sha256": hashlib.sha256(content).hexdigest(),
        "bytes": state.st_size,
        "changed": state.st_mtime_ns,
    }
