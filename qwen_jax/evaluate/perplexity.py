"""Perplexity: the exponential of the mean negative log-likelihood of the scored tokens."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

import numpy as np

from .scores import Scores, padded, target_log_probabilities


@dataclasses.dataclass(frozen=True)
class Perplexity:
    """How well a model predicts text.

    Attributes:
        tokens: scored tokens.
        mean_nll: mean negative log-likelihood of a token, in nats.
        standard_error: of `mean_nll`, as if tokens were independent.
    """

    tokens: int
    mean_nll: float
    standard_error: float

    @property
    def perplexity(self) -> float:
        """Exp of the mean; infinite where a float cannot hold it."""
        return float(np.exp(np.float64(self.mean_nll))) if self.mean_nll < 709 else math.inf

    @classmethod
    def of(cls, nll: np.ndarray) -> Perplexity:
        """From the negative log-likelihood of each token, float64 [N], N at least 1."""
        return cls(len(nll), float(nll.mean()), standard_error(nll))


def perplexity(scores: Iterable[Scores], *, what: str = "the model") -> Perplexity:
    """Perplexity of what `score` yields; the sum is in float64 on the host.

    Raises:
        FloatingPointError: NaN or infinite logits; names `what` and the window.
    """
    return Perplexity.of(np.concatenate([nll(part, what) for part in scores]))


def nll(scores: Scores, what: str) -> np.ndarray:
    """Negative log-likelihood of each token in nats, float64 [R]; see `perplexity`."""
    targets = padded(scores.targets)
    return -scores.finite(target_log_probabilities(scores.log_probabilities, targets), what)


def standard_error(values: np.ndarray) -> float:
    """Of the mean of independent values; NaN for a single one."""
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.nan
