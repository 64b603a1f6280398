"""What a training step reads."""

from __future__ import annotations

import numpy as np
from jaxtyping import Array

from ..pytree import pytree


@pytree
class Batch:
    """Rows of tokens and what follows each of them.

    Attributes:
        inputs: int32 [B, T].
        targets: int32 [B, T], the token after each input.
        lengths: int32 [B], real inputs of each row; padding is on the right.
        scored: bool [B, T], which targets count in the loss; none of padding does.
    """

    inputs: Array | np.ndarray
    targets: Array | np.ndarray
    lengths: Array | np.ndarray
    scored: Array | np.ndarray

    @classmethod
    def of_windows(cls, windows: np.ndarray) -> Batch:
        """Windows [..., B, T + 1] without padding: every token but the first is a target."""
        inputs, targets = windows[..., :-1], windows[..., 1:]
        lengths = np.full(inputs.shape[:-1], inputs.shape[-1], np.int32)
        return cls(
            inputs.astype(np.int32), targets.astype(np.int32), lengths, np.ones(inputs.shape, bool)
        )
