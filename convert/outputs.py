"""The tensors of a folder to be written, each made from those of another as it is written."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from qwen_jax.checkpoint.assemble import assemble, divisible, release, runs, stored_dtype
from qwen_jax.checkpoint.header import DTYPES
from qwen_jax.checkpoint.mapping import Experts, Layout
from qwen_jax.checkpoint.plan import LoadPlan, Source
from qwen_jax.checkpoint.safetensors_io import TensorFolder
from qwen_jax.checkpoint.tensors import StoredTensor, stored_tensors

from .edit import Edit
from .writing import OutputTensor

if TYPE_CHECKING:
    from qwen_jax.config import QwenConfig

    from .vocabulary import Vocabulary

CHUNK_BYTES = 16 << 20
_WORKERS = 2
_RUNS_KEPT = 32

_CODES = {dtype: code for code, dtype in DTYPES.items()}


def outputs(
    plan: LoadPlan,
    layout: Layout,
    edits: Sequence[Edit] = (),
    vocabulary: Vocabulary | None = None,
) -> list[OutputTensor]:
    """Lists the tensors of a folder that holds a planned model in a layout.

    Args:
        plan: where each tree tensor comes from.
        layout: names and grouping of the tensors to be written.
        edits: changes on the way, the first one first.
        vocabulary: tokens to add after them; the rows that they are made of are read.

    Returns:
        The tensors in the order of the tree. Each keeps the dtype of what it is made from; one
        made from tensors of several dtypes is float32, which holds them all exactly.
    """
    tree = _Tree(plan.folder, {source.path: source for source in plan.sources}, tuple(edits))
    if vocabulary is not None:
        tree = replace(tree, edits=(*tree.edits, vocabulary.edit(tree.chosen_rows)))
    stored = stored_tensors(plan.config, layout, plan.mtp_layers)
    return [tree.output(tensor) for tensor in stored.values()]


def released_layout(
    found: Layout, config: QwenConfig, *, vision: bool, experts: Experts | None = None
) -> Layout:
    """Gives the layout in which transformers loads a model.

    Args:
        found: how the folder groups its experts.
        config: the model, whose type decides the grouping of linear attention.
        vision: whether the folder holds the vision tower; a composite model has another prefix.
        experts: the grouping of experts to use in place of that of `found`.
    """
    return Layout(
        prefix="model.language_model." if vision else "model.",
        experts=experts or found.experts,
        mtp_experts=experts or found.mtp_experts,
        linear_projections="interleaved" if config.model_type == "qwen3_next" else "split",
    )


def largest_gather(plan: LoadPlan, layout: Layout) -> int:
    """Bytes, at most, of the largest tensor that has to be built in memory as a whole."""
    sources = {source.path: source for source in plan.sources}
    whole = [source.shape for source in plan.sources if not divisible(plan.folder, source)]
    stored = stored_tensors(plan.config, layout, plan.mtp_layers).values()
    regrouped = [tensor.shape for tensor in stored if not _is_tree(tensor, sources)]
    return 4 * max(map(math.prod, (*whole, *regrouped)), default=0)


def copies(folder: TensorFolder, keys: Iterable[str]) -> list[OutputTensor]:
    """Lists tensors that are written as they are.

    Raises:
        CheckpointError: a tensor has a dtype or a shape that NumPy cannot hold.
    """
    keys = list(keys)
    for key in keys:
        folder.read(key, slice(0, 0))
    return [_copy(folder, key) for key in keys]


@dataclass(frozen=True)
class _Tree:
    """The tree tensors of a folder, edited."""

    folder: TensorFolder
    sources: Mapping[str, Source]
    edits: tuple[Edit, ...]
    read: deque[tuple[str, slice]] = field(default_factory=deque)

    def output(self, tensor: StoredTensor) -> OutputTensor:
        dtypes = {self.dtype(piece.path) for piece in tensor.pieces}
        dtype = dtypes.pop() if len(dtypes) == 1 else np.dtype(np.float32)
        path = tensor.pieces[0].path
        if _is_tree(tensor, self.sources):
            shape = tensor.shape
            for edit in self.edits_of(path):
                shape = edit.shape(path, shape)
            return OutputTensor(tensor.key, _CODES[dtype], shape, lambda: self.whole(path))
        return OutputTensor(
            tensor.key, _CODES[dtype], tensor.shape, lambda: iter((self.regrouped(tensor, dtype),))
        )

    def dtype(self, path: str) -> np.dtype:
        return stored_dtype(self.folder, self.sources[path])

    def edits_of(self, path: str) -> list[Edit]:
        return [edit for edit in self.edits if path in edit.paths]

    def rows(self, path: str, rows: slice) -> np.ndarray:
        """A run of rows of a tree tensor, without those that an edit adds."""
        array = assemble(self.folder, self.sources[path], self.dtype(path), rows)
        for edit in self.edits_of(path):
            array = edit.apply(path, rows.start, array)
        return array

    def chosen_rows(self, path: str, numbers: np.ndarray) -> np.ndarray:
        """Single rows of a tree tensor."""
        return np.concatenate([self.rows(path, slice(i, i + 1)) for i in numbers.tolist()])

    def whole(self, path: str) -> Iterator[np.ndarray]:
        """A tree tensor run by run; runs are read and dequantised side by side."""
        pending: deque[tuple[slice, Future[np.ndarray]]] = deque()
        with ThreadPoolExecutor(_WORKERS) as pool:
            for rows in runs(self.folder, self.sources[path], CHUNK_BYTES):
                pending.append((rows, pool.submit(self.rows, path, rows)))
                if len(pending) > _WORKERS:
                    yield self.finished(path, *pending.popleft())
            while pending:
                yield self.finished(path, *pending.popleft())
        for edit in self.edits_of(path):
            yield edit.extra_rows(path, self.dtype(path))

    def finished(self, path: str, rows: slice, run: Future[np.ndarray]) -> np.ndarray:
        self.release_later(path, rows)
        return np.ascontiguousarray(run.result())

    def release_later(self, path: str, rows: slice) -> None:
        """Gives back the memory of what was read some runs ago; later ones are being written."""
        self.read.append((path, rows))
        if len(self.read) > _RUNS_KEPT:
            oldest, read = self.read.popleft()
            release(self.folder, self.sources[oldest], read)

    def regrouped(self, tensor: StoredTensor, dtype: np.dtype) -> np.ndarray:
        """A stored tensor that is not a tree tensor: of one expert, or of several tree tensors."""
        stored = np.empty(tensor.shape, dtype)
        for piece in tensor.pieces:
            if piece.expert is None:
                rows = slice(0, self.sources[piece.path].shape[0])
                piece.scatter(stored, self.rows(piece.path, rows))
            else:
                rows = slice(piece.expert, piece.expert + 1)
                piece._replace(expert=0).scatter(stored, self.rows(piece.path, rows))
            self.release_later(piece.path, rows)
        return stored


def _is_tree(tensor: StoredTensor, sources: Mapping[str, Source]) -> bool:
    """Whether a stored tensor is a tree tensor as it stands."""
    return len(tensor.pieces) == 1 and tensor.shape == sources[tensor.pieces[0].path].shape


def _copy(folder: TensorFolder, key: str) -> OutputTensor:
    info = folder.tensors[key]

    def chunks() -> Iterator[np.ndarray]:
        flat = folder.read(key).reshape(-1)
        step = CHUNK_BYTES // flat.dtype.itemsize
        for start in range(0, flat.size, step):
            yield flat[start : start + step]
        folder.release(key)

    return OutputTensor(key, info.dtype, info.shape, chunks)
