"""Two folders compared tensor by tensor, whatever their layouts."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from qwen_jax.checkpoint.assemble import assemble, divisible, release, runs, stored_dtype
from qwen_jax.checkpoint.header import DTYPES
from qwen_jax.checkpoint.keys import parse_key
from qwen_jax.checkpoint.plan import WEIGHT_DTYPES, LoadPlan, Source
from qwen_jax.checkpoint.safetensors_io import EVERY_ROW, TensorFolder
from qwen_jax.checkpoint.transforms import Piece
from qwen_jax.config import QwenConfig

from .source import SourceFolder

_RUN_BYTES = 16 << 20
_WEIGHT_DTYPES = [DTYPES[name] for name in WEIGHT_DTYPES]


@dataclass(frozen=True, kw_only=True)
class TensorDifference:
    """One tree tensor that is not the same in both folders.

    Attributes:
        path: tree path.
        shapes: of both; None where a folder lacks it.
        dtypes: stored dtypes of both; None where a folder lacks it.
        max_abs: largest absolute difference; NaN where shapes differ.
        max_rel: largest difference relative to the larger of the two values.
        count: number of values that differ. A NaN equals a NaN, and 0 equals -0 only if stored so.
    """

    path: str
    shapes: tuple[tuple[int, ...] | None, tuple[int, ...] | None]
    dtypes: tuple[str | None, str | None]
    max_abs: float
    max_rel: float
    count: int


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The result of a comparison.

    Attributes:
        compared: number of tensors in both: those of the model, its MTP head and, where both
            folders have it, its vision tower.
        tensors: those that differ, and those that one folder lacks, by tree path.
        config: fields of the configuration that differ, with both values.
        left_out: number of tensors that were not compared, by kind, in each folder.
    """

    compared: int
    tensors: tuple[TensorDifference, ...]
    config: dict[str, tuple[Any, Any]]
    left_out: tuple[dict[str, int], dict[str, int]]

    @property
    def equal(self) -> bool:
        """Whether configuration and every tensor, bit for bit, are the same."""
        return not self.tensors and not self.config


def diff(
    first: SourceFolder,
    second: SourceFolder,
    *,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> Difference:
    """Compares two model folders.

    Prefixes, grouping and files may differ; quantised matrices are compared as what they
    dequantise to. Memory: a few runs of rows of one tensor.

    Args:
        first: an opened model folder.
        second: another.
        progress: called with bytes of tree tensors of the first folder, as they are compared.

    Raises:
        CheckpointError: a tensor is damaged, or a file has changed since it was opened.
    """
    plans = first.load, second.load
    a, b = ({source.path: source for source in plan.sources} for plan in plans)
    vision = [_vision(plan.folder) for plan in plans]
    left_out = tuple(dict(plan.skipped) for plan in plans)
    if all(vision):
        a, b = a | vision[0], b | vision[1]
        left_out = tuple({k: n for k, n in kinds.items() if k != "visual"} for kinds in left_out)
    found = []
    for path in dict.fromkeys((*a, *b)):
        difference = _compare(plans, path, a.get(path), b.get(path), progress)
        if difference is not None:
            found.append(difference)
    return Difference(
        compared=len(a.keys() & b.keys()),
        tensors=tuple(found),
        config=_config_differences(plans[0].config, plans[1].config),
        left_out=(left_out[0], left_out[1]),
    )


def _vision(folder: TensorFolder) -> dict[str, Source]:
    """The tensors of the vision tower, by their keys without the prefix."""
    keys = [key for key in folder.tensors if parse_key(key).kind == "visual"]
    short = {key: "visual." + (key.partition("visual.")[2] or key) for key in keys}
    counts = Counter(short.values())
    sources = {}
    for key in keys:
        info = folder.tensors[key]
        folder.read(key, slice(0, 0))  # raises if NumPy cannot hold it
        path = short[key] if counts[short[key]] == 1 else key
        rows = info.shape[0] if info.shape else 1
        sources[path] = Source(path, info.shape, False, (Piece(path, key, 1, 0, rows, 0),))
    return sources


def _config_differences(first: QwenConfig, second: QwenConfig) -> dict[str, tuple[Any, Any]]:
    names = [field.name for field in dataclasses.fields(QwenConfig)]
    pairs = {name: (getattr(first, name), getattr(second, name)) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _compare(
    plans: tuple[LoadPlan, LoadPlan],
    path: str,
    a: Source | None,
    b: Source | None,
    progress: Callable[[int], None],
) -> TensorDifference | None:
    dtypes = _dtype(plans[0], a), _dtype(plans[1], b)
    found = TensorDifference(
        path=path,
        shapes=(None if a is None else a.shape, None if b is None else b.shape),
        dtypes=(None if a is None else dtypes[0].name, None if b is None else dtypes[1].name),
        max_abs=math.nan,
        max_rel=math.nan,
        count=0,
    )
    if a is None or b is None or a.shape != b.shape:
        return found
    largest, relative, count = 0.0, 0.0, 0
    for rows in _common_runs(plans, a, b):
        left = assemble(plans[0].folder, a, dtypes[0], rows)
        right = assemble(plans[1].folder, b, dtypes[1], rows)
        progress(left.nbytes)
        release(plans[0].folder, a, rows)
        release(plans[1].folder, b, rows)
        if dtypes[0] == dtypes[1] and _same_bits(left, right):
            continue
        run = _measure(left, right)
        largest, relative = max(largest, run[0]), max(relative, run[1])
        count += run[2]
    if not count and dtypes[0] == dtypes[1]:
        return None
    return dataclasses.replace(found, max_abs=largest, max_rel=relative, count=count)


def _dtype(plan: LoadPlan, source: Source | None) -> np.dtype:
    return np.dtype(np.float32) if source is None else stored_dtype(plan.folder, source)


def _common_runs(plans: tuple[LoadPlan, LoadPlan], a: Source, b: Source) -> Iterator[slice]:
    """Runs of rows that neither folder has to build twice."""
    if not a.shape:
        return iter((EVERY_ROW,))
    if all(divisible(plan.folder, source) for plan, source in zip(plans, (a, b), strict=True)):
        return runs(plans[0].folder, a, _RUN_BYTES)
    return iter((slice(0, a.shape[0]),))


def _same_bits(left: np.ndarray, right: np.ndarray) -> bool:
    a, b = (np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in (left, right))
    return np.array_equal(a, b)


def _measure(left: np.ndarray, right: np.ndarray) -> tuple[float, float, int]:
    """Largest absolute and relative difference, and the number of values that differ."""
    wide, bits = np.dtype(np.float32), np.dtype(np.uint32)
    if not all(array.dtype in _WEIGHT_DTYPES for array in (left, right)):
        wide, bits = np.dtype(np.float64), np.dtype(np.uint64)
    a, b = (array.astype(wide) for array in (left, right))
    differs = a.view(bits) != b.view(bits)
    differs &= ~(np.isnan(a) & np.isnan(b))
    if not differs.any():
        return 0.0, 0.0, 0
    a, b = a[differs].astype(np.float64), b[differs].astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        gap = np.abs(a - b)
        gap = np.where(np.isnan(gap), np.inf, gap)
        larger = np.fmax(np.abs(a), np.abs(b))
        relative = np.where(gap == 0, 0.0, np.where(np.isfinite(gap), gap / larger, np.inf))
    return float(gap.max()), float(relative.max()), int(differs.sum())
