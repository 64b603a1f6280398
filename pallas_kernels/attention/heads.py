"""The heads that the Triton kernels of attention take."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

HEAD_WIDTHS = (64, 128, 256)
DTYPES = ("bfloat16", "float32")


def head_refusals(width: int, what: str, dtypes: Iterable[Any]) -> list[str]:
    """Why no Triton kernel takes heads of this width and these dtypes; see `dtype_refusals`."""
    reasons = []
    if width not in HEAD_WIDTHS:
        reasons.append(f"head dim {width} is not one of {listed(HEAD_WIDTHS)}")
    return reasons + dtype_refusals(what, dtypes, DTYPES)


def dtype_refusals(what: str, dtypes: Iterable[Any], accepted: tuple[str, ...]) -> list[str]:
    """Why arrays are not taken; they need one dtype, of the accepted.

    Args:
        what: names of the arrays, in words.
        dtypes: their dtypes.
        accepted: names of the dtypes that are taken.
    """
    names = [str(dtype) for dtype in dtypes]
    if len(set(names)) == 1 and names[0] in accepted:
        return []
    return [
        f"dtypes of {what} ({listed(names)}) are not all the same one of {listed(accepted)}",
    ]


def listed(values: Iterable[Any]) -> str:
    """The values with commas between them."""
    return ", ".join(map(str, values))
