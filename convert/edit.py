"""What may change tree tensors on their way from one folder to another."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

import numpy as np


class Edit(Protocol):
    """A change of some tree tensors, applied run by run along their first axis.

    The methods are called for tensors of `paths` alone.
    """

    @property
    def paths(self) -> Collection[str]:
        """Tree paths that it changes."""
        ...

    def shape(self, path: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape afterwards: the same but for rows added at the end of the first axis."""
        ...

    def apply(self, path: str, start: int, rows: np.ndarray) -> np.ndarray:
        """The changed run of rows.

        Args:
            path: tree path.
            start: number of the first row.
            rows: the run; never altered.

        Returns:
            An array of the same shape and dtype.
        """
        ...

    def extra_rows(self, path: str, dtype: np.dtype) -> np.ndarray:
        """The rows added at the end, of the tensor's dtype; none where `shape` stays the same."""
        ...
