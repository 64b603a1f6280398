"""Several interventions as one: laid over one another, or one for each sequence."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..errors import RequestError
from ..model import Intervention
from ..model.intervention import NEUTRAL, Ranged
from .intervention_checks import check


def combine(first: Intervention, *others: Intervention) -> Intervention:
    """All of them at once.

    Biases add up, factors and temperatures multiply; of k and shared strengths the last counts.

    Raises:
        RequestError: they are for different models or batches, differ in the positions of the same
            thing, or together leave too few experts.
    """
    total = first
    for other in others:
        _check_alike(total, other)
        rows = max(each.bias.values.shape[1] for each in (total, other))
        fields: dict[str, Any] = {}
        for name in NEUTRAL:
            a, b = (_spread(getattr(each, name), rows) for each in (total, other))
            fields[name] = _joined(name, a, b, total.layers)
        slots = max(total.slots, other.slots)
        total = dataclasses.replace(total, **fields, slots=slots)
    return check(total)


def per_sequence(interventions: Sequence[Intervention | None]) -> Intervention:
    """One for each sequence of a batch; None changes nothing.

    Raises:
        RequestError: none at all, one that is for several sequences, or different models.
    """
    if isinstance(interventions, Intervention):
        raise RequestError("per_sequence got one intervention; give a list, with one a sequence")
    given = [each for each in interventions if each is not None]
    if not given:
        raise RequestError("per_sequence got no intervention; give one at least, or pass None on")
    for each in given:
        _check_alike(given[0], each)
        if (rows := each.bias.values.shape[1]) != 1:
            raise RequestError(
                f"per_sequence got an intervention for {rows} sequences; give one each"
            )
    nothing = _emptied(given[0])
    parts = [nothing if each is None else each for each in interventions]
    fields: dict[str, Any] = {}
    for name in NEUTRAL:
        own = [getattr(each, name) for each in parts]
        fields[name] = Ranged(
            *(
                jnp.concatenate([getattr(each, part) for each in own], axis=1)
                for part in ("values", "start", "stop")
            )
        )
    return dataclasses.replace(given[0], **fields, slots=max(each.slots for each in given))


def _joined(name: str, first: Ranged, second: Ranged, layers: tuple[int, ...]) -> Ranged:
    """Both; what only one says anything about has its positions."""
    a, b = (
        [np.asarray(array) for array in (each.values, each.start, each.stop)]
        for each in (first, second)
    )
    of_a, of_b = a[1] < a[2], b[1] < b[2]
    both = of_a & of_b
    differ = both & ((a[1] != b[1]) | (a[2] != b[2]))
    if differ.any():
        where = tuple(int(each) for each in np.argwhere(differ)[0])
        who = f"expert {where[2]} of layer" if differ.ndim == 3 else "layer"
        raise RequestError(
            f"{name} of {who} {layers[where[0]]} is given for positions "
            f"{int(a[1][where])} to {int(a[2][where])} and for {int(b[1][where])} to "
            f"{int(b[2][where])}; accepted is one range of positions for each"
        )
    together = {
        "bias": lambda: a[0] + b[0],
        "scale": lambda: a[0] * b[0],
        "temperature": lambda: a[0] * b[0],
    }.get(name, lambda: b[0])()
    values = np.where(both, together, np.where(of_b, b[0], a[0]))
    bounds = [np.where(of_b, b[i], a[i]) for i in (1, 2)]
    return Ranged(jnp.asarray(values), *map(jnp.asarray, bounds))


def _spread(ranged: Ranged, rows: int) -> Ranged:
    """For so many rows."""
    arrays = (ranged.values, ranged.start, ranged.stop)
    return Ranged(*(jnp.broadcast_to(a, (a.shape[0], rows, *a.shape[2:])) for a in arrays))


def _emptied(intervention: Intervention) -> Intervention:
    """One of the same structure that changes nothing."""
    fields: dict[str, Any] = {}
    for name, value in NEUTRAL.items():
        like = getattr(intervention, name)
        zeros = jnp.zeros_like(like.start)
        fields[name] = Ranged(jnp.full_like(like.values, value), zeros, zeros)
    return dataclasses.replace(intervention, **fields)


def _check_alike(first: Intervention, second: Intervention) -> None:
    for each in (first, second):
        if not isinstance(each, Intervention):
            raise RequestError(
                f"got a {type(each).__name__} in the place of an intervention; give what this "
                "module makes"
            )
    shapes = [(each.layers, *each.bias.values.shape) for each in (first, second)]
    (layers, _, rows, experts), (others, _, other_rows, other_experts) = shapes
    if layers != others or experts != other_experts:
        raise RequestError(
            f"interventions for MoE layers {layers} of {experts} experts and for {others} of "
            f"{other_experts}; make them with one model"
        )
    if rows != other_rows and 1 not in (rows, other_rows):
        raise RequestError(f"interventions for {rows} and for {other_rows} sequences")
