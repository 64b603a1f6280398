"""Tensors that are rounded without data, run by run, while they are written."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..methods import TensorReport, rounded_without_data
from .choice import Choice
from .packed import packed
from .weights import Weights


class Rounding:
    """Makes tensors in codes; of their weights and codes no more than a run is ever in memory.

    Scales are kept from the making of the codes until they are written. They are made anew where
    the codes were written by an earlier run.

    Args:
        weights: of the source.
        choice: the formats.
    """

    def __init__(self, weights: Weights, choice: Choice) -> None:
        self._weights, self._choice = weights, choice
        self._kept: dict[tuple[str, str], list[np.ndarray]] = {}
        self._remarks: dict[str, dict[str, Any]] = {}

    def chunks(self, path: str, part: str) -> Iterator[np.ndarray]:
        """Yields one of the parts of a tensor, as `TensorScheme.parts` names them, run by run."""
        if part == "codes":
            yield from self._codes(path)
            return
        if (path, part) not in self._kept:
            for _ in self._codes(path):
                pass
        yield from self._kept.pop((path, part))

    def remark(self, path: str) -> dict[str, Any]:
        """What is reported of a tensor whose codes were made."""
        return self._remarks.pop(path)

    def _codes(self, path: str) -> Iterator[np.ndarray]:
        begin, busy = time.monotonic(), 0.0
        rule, scheme = self._choice.rules[path], self._choice.scheme.tensors[path]
        kept: dict[str, list[np.ndarray]] = {part: [] for part in scheme.parts if part != "codes"}
        runs: list[tuple[TensorReport, float, int]] = []
        for run in self._weights.runs(path):
            part = packed(path, rounded_without_data(run, rule), scheme)
            square = float(np.square(run.astype(np.float64)).sum())
            runs.append((part.report, square, run.size))
            for name, chunks in kept.items():
                chunks.append(getattr(part, name))
            busy += time.monotonic() - begin
            yield part.codes
            begin = time.monotonic()
        self._kept |= {(path, name): chunks for name, chunks in kept.items()}
        self._remarks[path] = {**joined(runs).to_json(), "seconds": round(busy, 3)}


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
