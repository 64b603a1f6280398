"""Batches out of documents, in an order that depends on nothing but a seed and a step's number."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from ..errors import RequestError
from ..whole_number import check_whole
from .batch import Batch


def refuse_seed(seed: int) -> None:
    """Raise for a seed that JAX takes no key of: of larger ones it reads the lowest 32 bits."""
    if not 0 <= seed < 2**32:
        raise RequestError(f"seed is {seed}; accepted is a whole number from 0 to 2^32 - 1")


@dataclasses.dataclass(frozen=True)
class Data:
    """Windows over documents laid end to end.

    An epoch reads every token about once: the text is cut into windows from a random place on, and
    the windows are drawn without repetition. Each epoch has another place and another order. What
    a step reads follows from its number, so there is no position to be saved beside it.

    Args:
        tokens: int32 [N], see `joined`.
        rows: windows of a batch, B.
        window: inputs of a window, T; one more token is read as the last target.
        seed: of places and orders.

    Raises:
        RequestError: a number below 1, a seed outside 0 to 2^32 - 1, or fewer tokens than two
            windows.
    """

    tokens: np.ndarray
    rows: int
    window: int
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("rows", "window"):
            check_whole(name, getattr(self, name), 1)
        refuse_seed(self.seed)
        needed = 2 * self.window + 1
        if len(self.tokens) < needed:
            raise RequestError(
                f"the text has {len(self.tokens)} tokens; windows of {self.window} need {needed} "
                "at least: give a longer text or a smaller window"
            )

    @property
    def windows(self) -> int:
        """Windows of an epoch."""
        return (len(self.tokens) - self.window) // self.window

    @property
    def steps_per_epoch(self) -> float:
        """Steps in which as many windows are read as an epoch has."""
        return self.windows / self.rows

    def batches(self, first: int, steps: int) -> Batch:
        """What steps from `first` on read, in one `Batch` of arrays [steps, ...]."""
        number = np.arange(first * self.rows, (first + steps) * self.rows)
        epoch, place = np.divmod(number, self.windows)
        starts = np.empty(len(number), np.int64)
        for one in np.unique(epoch):
            offset, order = self._epoch(int(one))
            starts[epoch == one] = offset + self.window * order[place[epoch == one]]
        windows = self.tokens[starts[:, None] + np.arange(self.window + 1)[None, :]]
        return Batch.of_windows(windows.reshape(steps, self.rows, -1))

    def _epoch(self, number: int) -> tuple[int, np.ndarray]:
        """Where the first window begins, and the order of the windows."""
        random = np.random.default_rng((self.seed, number))
        left = len(self.tokens) - 1 - self.windows * self.window
        offset = int(random.integers(0, min(left, self.window - 1) + 1))
        return offset, random.permutation(self.windows)

    @property
    def digest(self) -> str:
        """SHA-256 of the tokens and of all that decides what a step reads."""
        digest = hashlib.sha256(self.tokens.astype("<i4").tobytes())
        digest.update(repr((self.rows, self.window, self.seed)).encode())
        return digest.hexdigest()


def joined(documents: Sequence[np.ndarray], separator: int | None) -> np.ndarray:
    """Documents end to end as int32 [N], with a token between each two.

    Args:
        documents: ids, int [*] each.
        separator: the token, the model's end of text; None for none.
    """
    if not documents:
        raise RequestError("there is no text; give at least one document")
    between = [] if separator is None else [np.array([separator], np.int32)]
    parts = [part for document in documents for part in (document.astype(np.int32), *between)]
    return np.concatenate(parts[: len(parts) - len(between)])


def held_out_batches(tokens: np.ndarray, rows: int, window: int) -> list[Batch]:
    """All windows of a text that stand alone, each target once, in batches of one shape.

    Args:
        tokens: int32 [N]; what is left behind the last whole window is not looked at.
        rows: windows of a batch; in the last one some may be empty.
        window: inputs of a window.

    Raises:
        RequestError: less than one window.
    """
    count = (len(tokens) - 1) // window
    if count < 1:
        raise RequestError(
            f"the held-out text has {len(tokens)} tokens; a window of {window} needs {window + 1}"
        )
    rows = min(rows, count)
    starts = np.minimum(np.arange(-(-count // rows) * rows), count - 1) * window
    whole = Batch.of_windows(tokens[starts[:, None] + np.arange(window + 1)[None, :]])
    real = np.arange(len(starts)) < count
    scored: Any = np.asarray(whole.scored) & real[:, None]
    whole = dataclasses.replace(whole, scored=scored)
    return [
        jax.tree.map(lambda x, i=i: x[i : i + rows], whole) for i in range(0, len(starts), rows)
    ]
