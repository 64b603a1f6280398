"""A trained model as a folder: a new one, or one like that which training began with."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from qwen_jax.checkpoint.header import DTYPES
from qwen_jax.checkpoint.mapping import Layout
from qwen_jax.checkpoint.tensors import StoredTensor, stored_tensors
from qwen_jax.config import QwenConfig
from qwen_jax.errors import RequestError

from .outputs import copies, outputs, released_layout
from .plan import Plan
from .run import HF_METADATA
from .side_files import copy_side_files, side_files, write_config
from .source import open_source
from .to_hf import plan_export
from .writing import OutputTensor, Written, plan_shards, write_folder

# Of a folder that a new model has its tokenizer from: what is not about that folder's weights.
_OF_TOKENIZER = ("tokenizer", "special_tokens", "added_tokens", "vocab", "merges", "chat_template")
_CODES = {dtype: code for code, dtype in DTYPES.items()}


def write_new(
    config: QwenConfig,
    parameters: Mapping[str, np.ndarray],
    destination: Path,
    *,
    tokenizer: Path | None,
    max_shard_bytes: int = 4 * 10**9,
) -> Written:
    """Writes a folder that transformers loads.

    Args:
        config: the model.
        parameters: its tree on the host, in the dtypes to be stored.
        destination: the folder; it must not exist.
        tokenizer: a folder whose tokenizer goes along; None for none.
        max_shard_bytes: most bytes of tensors in a file.

    Raises:
        CheckpointError: the destination cannot be written.
        RequestError: the parameters are not those of the configuration.
    """
    layout = released_layout(Layout(), config, vision=False)
    stored = stored_tensors(config, layout).values()
    _refuse_other_tree(stored, parameters)
    tensors = [_output(tensor, parameters) for tensor in stored]
    taken = [] if tokenizer is None else side_files(tokenizer)[0]
    taken = [name for name in taken if name.startswith(_OF_TOKENIZER)]

    def finish(folder: Path, checksums: Mapping[str, str], remarks: Mapping[str, Any]) -> None:
        if tokenizer is not None:
            copy_side_files(tokenizer, taken, folder)
        write_config(config.to_hf(), folder)

    return write_folder(
        destination,
        plan_shards(tensors, max_shard_bytes),
        fingerprint={"trained": _digest(parameters)},
        metadata=HF_METADATA,
        index_metadata={},
        finish=finish,
        resume=False,
        progress=lambda nbytes: None,
        keep=False,
    )


def plan_trained(source: Path, trained: Mapping[str, np.ndarray]) -> Plan:
    """Plans a folder like another, in which some parameters have other values.

    All else goes along: other parameters bit for bit, an MTP head, a vision tower, side files.

    Args:
        source: the folder that training began with.
        trained: float32 arrays by tree path; rounded to what the folder stores.

    Raises:
        CheckpointError: the folder is damaged or not understood.
        RequestError: arrays that the folder's model does not have.
    """
    plan, opened = plan_export(source), open_source(source)
    edit = _NewValues(trained)
    shapes = {one.path: one.shape for one in plan.load.sources}
    wrong = [path for path, value in trained.items() if shapes.get(path) != value.shape]
    if wrong:
        raise RequestError(f"{source} has no parameters {wrong[:3]} of these shapes")
    return replace(
        plan,
        tensors=outputs(plan.load, plan.record.layout, (edit,))
        + copies(opened.folder, opened.vision),
        edited=tuple(trained),
        identity={**plan.identity, "trained": _digest(trained)},
    )


@dataclass(frozen=True)
class _NewValues:
    """Other values in the place of a folder's; see `edit.Edit`."""

    values: Mapping[str, np.ndarray]

    @property
    def paths(self) -> Collection[str]:
        return self.values.keys()

    def shape(self, path: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape

    def apply(self, path: str, start: int, rows: np.ndarray) -> np.ndarray:
        return self.values[path][start : start + len(rows)].astype(rows.dtype)

    def extra_rows(self, path: str, dtype: np.dtype) -> np.ndarray:
        return np.empty((0, *self.values[path].shape[1:]), dtype)


def _refuse_other_tree(stored: Collection[StoredTensor], parameters: Mapping[str, Any]) -> None:
    wanted = {piece.path for tensor in stored for piece in tensor.pieces}
    if wanted != parameters.keys():
        missing, other = sorted(wanted - parameters.keys()), sorted(parameters.keys() - wanted)
        raise RequestError(
            f"the parameters are not those of the configuration: {missing[:3]} are missing, "
            f"{other[:3]} are unknown; routers and experts of your own have no Hugging Face layout"
        )


def _output(tensor: StoredTensor, parameters: Mapping[str, np.ndarray]) -> OutputTensor:
    dtype = parameters[tensor.pieces[0].path].dtype

    def chunks() -> Iterator[np.ndarray]:
        first = parameters[tensor.pieces[0].path]
        if len(tensor.pieces) == 1 and tensor.shape == first.shape:
            yield np.ascontiguousarray(first)
            return
        whole = np.empty(tensor.shape, dtype)
        for piece in tensor.pieces:
            piece.scatter(whole, parameters[piece.path])
        yield whole

    return OutputTensor(tensor.key, _CODES[dtype], tensor.shape, chunks)


def _digest(parameters: Mapping[str, np.ndarray]) -> str:
    digest = hashlib.sha256()
    for path in sorted(parameters):
        digest.update(path.encode() + np.ascontiguousarray(parameters[path]).tobytes())
    return digest.hexdigest()
