"""Whole numbers that callers give: what counts as one, and the error about what does not."""

from typing import Any, TypeGuard

import numpy as np

from .errors import RequestError


def is_whole(value: Any) -> TypeGuard[int | np.integer]:
    """Whether it is a whole number, Python's or numpy's; True and False are none."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def check_whole(name: str, value: Any, least: int) -> int:
    """The value, if it is a whole number from `least` on.

    Raises:
        RequestError: it is not; names it.
    """
    if not is_whole(value) or value < least:
        raise RequestError(f"{name} is {value!r}; accepted is a whole number from {least} on")
    return int(value)
