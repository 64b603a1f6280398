"""The figures of each step as lines of JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import RequestError


class MetricsFile:
    """One JSON object a line: `step`, from 1 on, and figures by name.

    A number that JSON does not have is written as null. Lines are on the disk when `write` returns.

    Args:
        path: the file.
        steps: how many steps a run that goes on has taken; lines of later ones are dropped, so
            that each step is there once. 0 begins a new file.

    Raises:
        RequestError: the file cannot be written, or is not one of these.
    """

    def __init__(self, path: Path, steps: int = 0):
        kept = []
        try:
            if steps and path.exists():
                lines = path.read_text(encoding="utf-8").splitlines()
                kept = [line for line in lines if _step(line, path) <= steps]
            self._file = path.open("w", encoding="utf-8")
        except OSError as error:
            raise RequestError(f"{path} cannot be written: {error.strerror}") from error
        self._file.writelines(line + "\n" for line in kept)
        self._file.flush()

    def write(self, first: int, figures: Mapping[str, Sequence[float] | np.ndarray]) -> None:
        """Adds lines.

        Args:
            first: number of the first step.
            figures: of each step, by name.
        """
        for place in range(len(next(iter(figures.values())))):
            values = {name: _number(values[place]) for name, values in figures.items()}
            self._file.write(json.dumps({"step": first + place, **values}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _number(value: Any) -> float | None:
    value = float(value)
    return value if math.isfinite(value) else None


def _step(line: str, path: Path) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        if not line.endswith("}"):
            return 2**62  # cut off when the run was killed
        raise RequestError(
            f"{path} holds {line[:60]!r}, which is no line of a run's figures; give another file"
        ) from None
