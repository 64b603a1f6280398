"""Interventions that leave a token without its experts, or numbers that float32 cannot carry."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..errors import RequestError
from ..model import Intervention
from ..model.intervention import Ranged

LARGEST = 1e6
"""Of biases, factors and temperatures."""


def number_within(name: str, value: Any, least: float, most: float) -> float:
    """The value, if it is a number in a range.

    Raises:
        RequestError: it is not.
    """
    try:
        number = math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not least <= number <= most:
        raise RequestError(f"{name} is {value!r}; accepted are numbers from {least:g} to {most:g}")
    return number


def check(intervention: Intervention) -> Intervention:
    """The intervention, if at every position each token finds as many experts as it takes.

    Args:
        intervention: with concrete values.

    Raises:
        RequestError: names layer, row and positions, and how many experts are left; or a bias,
            factor or temperature that became too large or small by adding or multiplying.
    """
    _check_numbers(intervention)
    starts = [
        np.unique(np.concatenate([np.ravel(each.start), np.ravel(each.stop)]))
        for each in (intervention.banned, intervention.forced, intervention.limit)
    ]
    # Nothing changes between these.
    for position in np.unique(np.concatenate(starts)):
        _check_at(intervention, int(position))
    return intervention


def _check_numbers(intervention: Intervention) -> None:
    for name, least in (("bias", 0), ("scale", 0), ("temperature", 1 / LARGEST)):
        size = np.abs(np.asarray(getattr(intervention, name).values, np.float64))
        # Of float32 numbers, so that a limit itself is fine.
        wrong = size[(size < least * (1 - 1e-6)) | (size > LARGEST)]
        if wrong.size:
            raise RequestError(
                f"a {name} of size {wrong[0]:g} comes out; accepted is {least:g} to {LARGEST:g}"
            )


def _check_at(intervention: Intervention, position: int) -> None:
    banned, forced = (
        _at(each, position) & np.asarray(each.values)
        for each in (intervention.banned, intervention.forced)
    )
    limit = np.where(_at(intervention.limit, position), intervention.limit.values, 0)
    taken = np.where(limit == 0, intervention.own, limit)
    left, wanted = (~banned).sum(axis=-1), forced.sum(axis=-1)
    for index, row in np.argwhere(left < taken)[:1].tolist():
        raise RequestError(
            f"the intervention leaves {left[index, row]} experts of {banned.shape[-1]} in "
            f"{_place(intervention, index, row, position)}, where a token takes "
            f"{taken[index, row]}; ban fewer, or lower k with experts_per_token first"
        )
    for index, row in np.argwhere(wanted > taken)[:1].tolist():
        raise RequestError(
            f"the intervention forces {wanted[index, row]} experts in "
            f"{_place(intervention, index, row, position)}, where a token takes "
            f"{taken[index, row]}; force fewer, or raise k with experts_per_token first"
        )
    for index, row, expert in np.argwhere(banned & forced)[:1].tolist():
        raise RequestError(
            f"expert {expert} is both banned and forced in "
            f"{_place(intervention, index, row, position)}"
        )


def _at(ranged: Ranged, position: int) -> np.ndarray:
    """Where the values count at a position."""
    return (np.asarray(ranged.start) <= position) & (position < np.asarray(ranged.stop))


def _place(intervention: Intervention, index: int, row: int, position: int) -> str:
    rows = intervention.bias.values.shape[1]
    which = "" if rows == 1 else f" of sequence {row}"
    return f"layer {intervention.layers[index]}{which} from position {position} on"
