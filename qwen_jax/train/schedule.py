"""The learning rate over a run. It is worked out on the host: no program depends on it."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from ..errors import RequestError


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A straight rise from nothing, then half a cosine down.

    Attributes:
        steps: of the whole run; the rate falls towards the last one.
        rate: the largest.
        warmup: steps of the rise.
        final: share of the rate that is left at the last step.

    Raises:
        RequestError: a number outside its range.
    """

    steps: int
    rate: float = 1e-3
    warmup: int = 0
    final: float = 0.1

    def __post_init__(self) -> None:
        accepted = {
            "steps": (self.steps >= 1, "a whole number from 1 on"),
            "rate": (0 < self.rate < math.inf, "a number above 0"),
            "warmup": (0 <= self.warmup <= self.steps, f"0 to {self.steps}, the steps"),
            "final": (0 <= self.final <= 1, "0 to 1"),
        }
        for name, (fine, what) in accepted.items():
            if not fine:
                raise RequestError(f"{name} is {getattr(self, name)}; accepted is {what}")

    def at(self, step: int) -> float:
        """The rate of a step, the first being 0."""
        if step < self.warmup:
            return self.rate * (step + 1) / self.warmup
        share = (step - self.warmup) / max(self.steps - 1 - self.warmup, 1)
        fall = 0.5 * (1 + math.cos(math.pi * min(share, 1.0)))
        return self.rate * (self.final + (1 - self.final) * fall)

    def rates(self, first: int, steps: int) -> np.ndarray:
        """Float32 [steps], the rates from step `first` on."""
        return np.array([self.at(first + i) for i in range(steps)], np.float32)
