"""Tensors that are rounded without data, run by run, while they are written."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from qwen_jax.quant import Rule, TensorScheme

from ..methods import TensorReport, solve
from .packed import Packed, packed
from .weights import Weights


class Rounded:
    """One tensor in codes; of its weights and codes no more than a run is ever in memory.

    Scales are kept from the making of the codes until they are written. They are made anew where
    the codes were written by an earlier run.

    Args:
        weights: of the source.
        path: of the tensor.
        rule: its format.
        scheme: how it is stored.
    """

    def __init__(self, weights: Weights, path: str, rule: Rule, scheme: TensorScheme) -> None:
        self._weights, self._path, self._rule, self._scheme = weights, path, rule, scheme
        self._kept: dict[str, list[np.ndarray]] = {}
        self._remark: dict[str, Any] = {}

    def chunks(self, part: str) -> Iterator[np.ndarray]:
        """Yields one of the parts of `quant.abstract.PARTS`, run by run."""
        if part == "codes":
            yield from self._codes()
            return
        if part not in self._kept:
            for _ in self._codes():
                pass
        yield from self._kept.pop(part)

    def remark(self) -> dict[str, Any]:
        """What to say of it, when the codes were made."""
        return self._remark

    def _codes(self) -> Iterator[np.ndarray]:
        begin, busy = time.monotonic(), 0.0
        self._kept = {"scale": [], "zero": [], "input_scale": []}
        reports: list[tuple[TensorReport, float, int]] = []
        for run in self._weights.runs(self._path):
            part = self._solved(run)
            square = float(np.square(run.astype(np.float32), dtype=np.float64).sum())
            reports.append((part.report, square, run.size))
            for name, chunks in self._kept.items():
                if (array := getattr(part, name)) is not None:
                    chunks.append(array)
            busy += time.monotonic() - begin
            yield part.codes
            begin = time.monotonic()
        self._remark = {**joined(reports).to_json(), "seconds": round(busy, 3)}

    def _solved(self, run: np.ndarray) -> Packed:
        return packed(self._path, solve(jnp.array(run), self._rule), self._scheme)


def joined(runs: list[tuple[TensorReport, float, int]]) -> TensorReport:
    """The report of a tensor from those of its runs, rounded without data.

    Args:
        runs: of each the report, ||W||^2, and the number of weights.
    """
    first = runs[0][0]
    total = sum(square for _, square, _ in runs)
    error = sum(report.weight_error**2 * square for report, square, _ in runs)
    count = sum(size for _, _, size in runs)
    clipped = sum(report.clipped * size for report, _, size in runs) / count
    return dataclasses.replace(
        first, weight_error=(error / total) ** 0.5 if total else 0.0, clipped=clipped
    )
