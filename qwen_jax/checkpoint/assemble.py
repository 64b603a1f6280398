"""Tree tensors built on the host from the tensors of a folder, whole or in runs of rows."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from .header import DTYPES
from .plan import Source
from .safetensors_io import EVERY_ROW, TensorFolder

_ALIGNMENT = 64


def stored_dtype(folder: TensorFolder, source: Source) -> np.dtype:
    """The dtype that holds a tree tensor exactly: that of its parts, or float32 if they differ."""
    dtypes = {folder.tensors[piece.key].dtype for piece in source.pieces}
    return DTYPES[dtypes.pop()] if len(dtypes) == 1 else np.dtype(np.float32)


def assemble(
    folder: TensorFolder, source: Source, dtype: np.dtype, rows: slice = EVERY_ROW
) -> np.ndarray:
    """Builds one tree tensor on the host, or a run of its rows.

    Args:
        folder: the folder that the source was planned for.
        source: the tensor.
        dtype: dtype of the result.
        rows: which part of the first axis.

    Returns:
        The rows: a read-only view of the file if they are stored just so, else a new array.
    """
    whole = _stored_whole(folder, source)
    if whole is not None:
        stored = folder.read(whole, rows)
        return stored if stored.dtype == dtype else aligned_copy(stored, dtype)
    if source.pieces[0].expert is None:
        return _gather(folder, source, dtype)[rows]
    start, stop, _ = rows.indices(source.shape[0])
    tree = _aligned_empty((stop - start, *source.shape[1:]), dtype)
    for piece in source.pieces:
        if piece.expert is not None and start <= piece.expert < stop:
            piece._replace(expert=piece.expert - start).gather(tree, folder.read(piece.key))
    return tree


def runs(folder: TensorFolder, source: Source, limit: int) -> Iterator[slice]:
    """Divides the first axis of a tree tensor into runs that `assemble` builds without waste.

    Args:
        folder: the folder that the source was planned for.
        source: the tensor.
        limit: most bytes of a run, in the dtype of the folder; at least one row is in each. A
            tensor whose rows are gathered from all over others is one run.

    Yields:
        The runs in order.
    """
    total = source.shape[0]
    if not divisible(folder, source):
        yield slice(0, total)
        return
    row = math.prod(source.shape[1:]) * stored_dtype(folder, source).itemsize
    step = max(1, limit // max(row, 1))
    for start in range(0, total, step):
        yield slice(start, min(start + step, total))


def release(folder: TensorFolder, source: Source, rows: slice = EVERY_ROW) -> None:
    """Gives back the memory of rows of a tree tensor that `assemble` has read."""
    whole = _stored_whole(folder, source)
    if whole is not None:
        folder.release(whole, rows)
        return
    start, stop, _ = rows.indices(source.shape[0])
    for piece in source.pieces:
        if piece.expert is None or start <= piece.expert < stop:
            folder.release(piece.key)


def aligned_copy(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Copies an array to memory that JAX on a CPU takes over as it is."""
    copy = _aligned_empty(array.shape, dtype)
    np.copyto(copy, array, casting="unsafe")
    return copy


def divisible(folder: TensorFolder, source: Source) -> bool:
    """Whether rows of a tree tensor can be built without the others."""
    return _stored_whole(folder, source) is not None or source.pieces[0].expert is not None


def _aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array at an address that JAX on a CPU needs, or else it copies: a multiple of 64."""
    nbytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + nbytes].view(dtype).reshape(shape)


def _stored_whole(folder: TensorFolder, source: Source) -> str | None:
    """The key of the stored tensor that is the tree tensor, if there is one."""
    only = source.pieces[0].key if len(source.pieces) == 1 else None
    return only if only is not None and folder.tensors[only].shape == source.shape else None


def _gather(folder: TensorFolder, source: Source, dtype: np.dtype) -> np.ndarray:
    tree = _aligned_empty(source.shape, dtype)
    for piece in source.pieces:
        piece.gather(tree, folder.read(piece.key))
    return tree
