"""Interventions that leave a token without the experts it takes."""

from __future__ import annotations

import numpy as np

from ..errors import RequestError
from ..model import Intervention
from ..model.intervention import Ranged


def check(intervention: Intervention) -> Intervention:
    """The intervention, if at every position each token finds as many experts as it takes.

    Args:
        intervention: with concrete values.

    Raises:
        RequestError: names layer, row and positions, and how many experts are left.
    """
    starts = [
        np.unique(np.concatenate([np.ravel(each.start), np.ravel(each.stop)]))
        for each in (intervention.banned, intervention.forced, intervention.limit)
    ]
    # Nothing changes between these.
    for position in np.unique(np.concatenate(starts)):
        _check_at(intervention, int(position))
    return intervention


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
