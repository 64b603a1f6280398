"""What a training step reads."""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Array

from ..pytree import pytree


@pytree
class Batch:
    """Rows of tokens and what follows each of them, on the host or on a device.

    Attributes:
        inputs: int32 [B, T].
        targets: int32 [B, T], the token after each input.
        lengths: int32 [B], real inputs of each row; padding is on the right.
        scored: bool [B, T], which targets count in the loss; none of padding does.
    """

    inputs: Array
    targets: Array
    lengths: Array
    scored: Array

    @classmethod
    def of_windows(cls, windows: np.ndarray) -> Batch:
        """Windows [..., B, T + 1] without padding: every token but the first is a target."""
        inputs, targets = windows[..., :-1], windows[..., 1:]
        lengths = np.full(inputs.shape[:-1], inputs.shape[-1])
        ids = (x.astype(np.int32) for x in (inputs, targets, lengths))
        arrays: tuple[Any, ...] = (*ids, np.ones(inputs.shape, bool))
        return cls(*arrays)
