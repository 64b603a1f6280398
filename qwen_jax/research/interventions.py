"""Constructors of interventions: ban, force, bias, scale, k, temperature, the shared expert.

Each gives an `Intervention` of one structure, so that a compiled program takes them all, and each
can be laid over another with `base`. `model` is a model or its configuration; layers are numbered
as in the model; `positions` are (first, behind the last), None for no end.

    without = ban(model, [3, 7], layers=[1], positions=(10, None))
    cooler = temperature(model, 0.7, base=without)
    model(tokens, intervention=per_sequence([None, cooler]))
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..config import QwenConfig
from ..errors import RequestError
from ..model import CausalLM, Intervention
from ..model.intervention import NEUTRAL, Ranged, sparse_layers
from ..model.routing import own_number
from ..whole_number import is_whole
from .intervention_checks import LARGEST, check, number_within
from .intervention_joins import combine, per_sequence

__all__ = [
    "add_bias",
    "ban",
    "combine",
    "experts_per_token",
    "force",
    "neutral",
    "per_sequence",
    "scale_weights",
    "shared_expert",
    "temperature",
]

END = np.iinfo(np.int32).max
Model = CausalLM | QwenConfig
Numbers = Iterable[int] | np.ndarray | jax.Array
Positions = tuple[int, int | None]
ALWAYS: Positions = (0, None)
_DTYPES = {"banned": np.bool_, "forced": np.bool_, "limit": np.int32}
_PER_EXPERT = ("banned", "forced", "bias", "scale")


def neutral(model: Model) -> Intervention:
    """One that changes nothing: logits are equal bit for bit.

    Raises:
        RequestError: a model without MoE layers.
    """
    config = _config(model)
    layers = sparse_layers(config)
    fields: dict[str, Any] = {}
    for name, value in NEUTRAL.items():
        shape = (len(layers), 1, config.num_experts)[: 3 if name in _PER_EXPERT else 2]
        fields[name] = Ranged(
            jnp.asarray(np.full(shape, value, _DTYPES.get(name, np.float32))),
            jnp.zeros(shape, jnp.int32),
            jnp.zeros(shape, jnp.int32),
        )
    routers = {} if isinstance(model, QwenConfig) else model.routers()
    own = own_number(config.num_experts_per_tok, routers)
    return Intervention(**fields, layers=layers, own=own, slots=own)


def ban(
    model: Model,
    experts: Numbers,
    *,
    layers: Numbers | None = None,
    positions: Positions = ALWAYS,
    base: Intervention | None = None,
) -> Intervention:
    """Experts that are not chosen; others take their places.

    Raises:
        RequestError: a layer is left with fewer experts than a token takes, a number that does not
            exist, or positions that `base` has otherwise for the same thing.
    """
    values = dict.fromkeys(_listed(experts, "experts"), True)
    return _changed(model, "banned", values, layers, positions, base)


def force(
    model: Model,
    experts: Numbers,
    *,
    layers: Numbers | None = None,
    positions: Positions = ALWAYS,
    base: Intervention | None = None,
) -> Intervention:
    """Experts that every token takes; their weights follow from their own scores.

    Raises:
        RequestError: more experts than a token takes, a banned one, and as for `ban`.
    """
    values = dict.fromkeys(_listed(experts, "experts"), True)
    return _changed(model, "forced", values, layers, positions, base)


def add_bias(
    model: Model,
    bias: Mapping[int, float] | Sequence[float] | np.ndarray,
    *,
    layers: Numbers | None = None,
    positions: Positions = ALWAYS,
    base: Intervention | None = None,
) -> Intervention:
    """Numbers added to router logits, for the choice and for the weights; to those of `base` too.

    Args:
        model: a model or its configuration.
        bias: expert -> number, or a number for each expert.
        layers: numbers of MoE layers; all if None.
        positions: where it counts.
        base: what it is laid over.

    Raises:
        RequestError: numbers that are not within 1e6, and as for `ban`.
    """
    return _changed(model, "bias", bias, layers, positions, base)


def scale_weights(
    model: Model,
    factors: Mapping[int, float] | Sequence[float] | np.ndarray,
    *,
    layers: Numbers | None = None,
    positions: Positions = ALWAYS,
    base: Intervention | None = None,
) -> Intervention:
    """Factors of the experts' weights; the choice is as before. They multiply those of `base`.

    With 0 an expert takes its place and adds nothing. Arguments and errors are those of `add_bias`.
    """
    return _changed(model, "scale", factors, layers, positions, base)


def experts_per_token(
    model: Model,
    k: int,
    *,
    layers: Numbers | None = None,
    positions: Positions = ALWAYS,
    base: Intervention | None = None,
) -> Intervention:
    """Another number of experts a token.

    More than the model's own need more slots, and so another program: compiled once for each k.

    Raises:
        RequestError: a k below 1 or above the number of experts, and as for `ban`.
    """
    experts = _config(model).num_experts
    if not is_whole(k) or not 1 <= k <= max(experts, 1):
        raise RequestError(f"k is {k!r}; accepted is a whole number from 1 to {experts}")
    base = neutral(model) if base is None else base
    base = dataclasses.replace(base, slots=max(base.slots, int(k)))
    return _changed(model, "limit", int(k), layers, positions, base)


def temperature(
    model: Model,
    value: float,
    *,
    layers: Numbers | None = None,
    positions: Positions = ALWAYS,
    base: Intervention | None = None,
) -> Intervention:
    """What router logits are divided by: above 1 evens the weights out, below 1 sharpens them.

    Raises:
        RequestError: a temperature outside 1e-6 to 1e6, and as for `ban`.
    """
    value = number_within("temperature", value, 1 / LARGEST, LARGEST)
    return _changed(model, "temperature", value, layers, positions, base)


def shared_expert(
    model: Model,
    strength: float,
    *,
    layers: Numbers | None = None,
    positions: Positions = ALWAYS,
    base: Intervention | None = None,
) -> Intervention:
    """A fixed strength of the shared expert in place of its gate's; 0 leaves the expert out.

    Raises:
        RequestError: a strength outside 0 to 1, a model without shared experts, and as for `ban`.
    """
    config = _config(model)
    strength = number_within("strength", strength, 0.0, 1.0)
    for layer in _layers(config, layers):
        if not config.width("shared_expert_intermediate_size", layer):
            raise RequestError(
                f"layer {layer} of this {config.model_type} model has no shared expert"
            )
    if strength in (0, 1):
        logit = math.inf if strength else -math.inf
    else:
        logit = math.log(strength / (1 - strength))
    return _changed(model, "shared_logit", logit, layers, positions, base)


def _changed(
    model: Model,
    name: str,
    values: Any,
    layers: Numbers | None,
    positions: Positions,
    base: Intervention | None,
) -> Intervention:
    """`base`, or nothing, with one field changed in some layers."""
    config, nothing = _config(model), neutral(model)
    start, stop = _range(positions)
    like = getattr(nothing, name)
    arrays = [np.array(each) for each in (like.values, like.start, like.stop)]
    for index in [nothing.layers.index(layer) for layer in _layers(config, layers)]:
        if name in _PER_EXPERT:
            numbers = _of_experts(values, config.num_experts)
            where, content = (index, 0, list(numbers)), list(numbers.values())
        else:
            where, content = (index, 0), values
        for array, value in zip(arrays, (content, start, stop), strict=True):
            array[where] = value
    part = dataclasses.replace(nothing, **{name: Ranged(*map(jnp.asarray, arrays))})
    return check(part) if base is None else combine(base, part)


def _of_experts(values: Any, experts: int) -> dict[int, Any]:
    """Expert -> value."""
    if not isinstance(values, Mapping):
        array = np.asarray(values)
        if array.shape != (experts,):
            raise RequestError(
                f"values of shape {array.shape}; accepted are {experts} numbers, one an expert, or "
                "a mapping from experts to numbers"
            )
        values = dict(enumerate(array))
    for expert, value in values.items():
        if not is_whole(expert) or not 0 <= expert < experts:
            raise RequestError(f"expert {expert!r} does not exist; accepted are 0 to {experts - 1}")
        number_within(f"the value of expert {expert}", value, -LARGEST, LARGEST)
    return dict(values)


def _listed(values: Any, what: str) -> list[Any]:
    """Elements of a list, a range or an array as Python's own numbers."""
    if not isinstance(values, Iterable) or isinstance(values, str):
        raise RequestError(f"{what} is {values!r}; accepted is a list of whole numbers")
    scalar = (np.generic, np.ndarray, jax.Array)
    return [each.item() if isinstance(each, scalar) and each.ndim == 0 else each for each in values]


def _range(positions: Positions) -> tuple[int, int]:
    pair = tuple(positions) if isinstance(positions, Sequence) else ()
    numbers: list[Any] = [END if at == 1 and each is None else each for at, each in enumerate(pair)]
    whole = len(pair) == 2 and all(map(is_whole, numbers))
    if not whole or not 0 <= numbers[0] < min(numbers[1], END):
        raise RequestError(
            f"positions are {positions!r}; accepted are two whole numbers (first, behind the last) "
            "from 0 on, with None for no end"
        )
    return int(numbers[0]), min(int(numbers[1]), END)


def _layers(config: QwenConfig, layers: Numbers | None) -> list[int]:
    every = sparse_layers(config)
    chosen = every if layers is None else _listed(layers, "layers")
    for layer in chosen:
        if layer not in every or not is_whole(layer):
            raise RequestError(f"layer {layer!r} is no MoE layer; accepted are {list(every)}")
    return [int(layer) for layer in chosen]


def _config(model: Model) -> QwenConfig:
    config = model if isinstance(model, QwenConfig) else getattr(model, "config", None)
    if not isinstance(config, QwenConfig):
        raise RequestError(f"the model is {model!r}; accepted is a loaded model or a QwenConfig")
    return config
