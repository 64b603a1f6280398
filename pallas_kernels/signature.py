"""A call's arrays against what the annotations of an operation's definition say of them.

Kernels work on flat memory: with a shape that contradicts another they would read or write
somewhere else, so that every call is checked before one runs.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import jaxtyping

_KINDS = {
    jaxtyping.Float: ("floating point", lambda dtype: jnp.issubdtype(dtype, jnp.floating)),
    jaxtyping.Bool: ("bool", lambda dtype: dtype == jnp.bool_),
    jaxtyping.Int: ("int32", lambda dtype: dtype == jnp.int32),
    jaxtyping.UInt: ("uint32", lambda dtype: dtype == jnp.uint32),
    jaxtyping.Real: ("numbers", lambda dtype: jnp.issubdtype(dtype, jnp.number)),
}


@dataclasses.dataclass(frozen=True)
class Parameter:
    """An array that a function takes.

    Attributes:
        name: of the parameter.
        letters: its dimensions; equal letters are equal sizes, unless they begin with "_". "..."
            in front is any number.
        kind: jaxtyping's class of its dtype.
        optional: whether it may be None.
        others: classes whose objects, of a shape but no dtype, may stand for the array.
        many: whether it is a tuple of such arrays.
    """

    name: str
    letters: tuple[str, ...]
    kind: Any
    optional: bool
    others: tuple[type, ...] = ()
    many: bool = False


@functools.cache
def parameters(function: Callable[..., Any]) -> tuple[Parameter | None, ...]:
    """The parameters of a function in order; None for one that is no array."""
    found = []
    hints = typing.get_type_hints(function)
    hints.pop("return", None)
    for name, hint in hints.items():
        many = typing.get_origin(hint) is tuple
        one = typing.get_args(hint)[0] if many else hint
        options = typing.get_args(one) or (one,)
        arrays = [option for option in options if hasattr(option, "dim_str")]
        if not arrays:
            found.append(None)
            continue
        letters = tuple(arrays[0].dim_str.split())
        others = tuple(o for o in options if o not in arrays and o is not type(None))
        optional = type(None) in options
        found.append(Parameter(name, letters, arrays[0].dtype, optional, others, many))
    return tuple(found)


def contradictions(function: Callable[..., Any], arrays: Sequence[Any]) -> list[str]:
    """What is wrong with the arrays of a call, whatever runs it; empty if nothing is.

    Args:
        function: the definition, whose parameters have jaxtyping's annotations.
        arrays: its positional arguments, or shapes and dtypes in their place.
    """
    reasons: list[str] = []
    sizes: dict[str, tuple[Any, str]] = {}
    for parameter, array in zip(parameters(function), arrays, strict=False):
        if parameter is None or (array is None and parameter.optional):
            continue
        for part, value in _parts(parameter, array):
            reasons += _mistakes(part, value) or _mismatches(part, value, sizes)
    return reasons


def _parts(parameter: Parameter, value: Any) -> list[tuple[Parameter, Any]]:
    """Each array of a tuple, with a name of its own; an argument that is no tuple, as it is."""
    if not parameter.many or not isinstance(value, tuple) or not value:
        return [(parameter, value)]
    return [
        (dataclasses.replace(parameter, name=f"{parameter.name}[{index}]", many=False), array)
        for index, array in enumerate(value)
    ]


def _mistakes(parameter: Parameter, array: Any) -> list[str]:
    """What is wrong with one array alone."""
    name, letters = parameter.name, parameter.letters
    if parameter.many:
        return [f"{name} is {array!r}; accepted is a tuple of arrays {_shown(letters)}"]
    if not isinstance(array, parameter.others):
        if not hasattr(array, "shape") or not hasattr(array, "dtype"):
            return [f"{name} is {array!r}; accepted is an array {_shown(letters)}"]
        accepted, is_kind = _KINDS[parameter.kind]
        if not is_kind(array.dtype):
            return [f"{name} is {array.dtype}; accepted is {accepted}"]
    least = len(letters) - ("..." in letters)
    if len(array.shape) < least or (least == len(letters) < len(array.shape)):
        return [f"{name} has shape {list(array.shape)}; accepted is {_shown(letters)}"]
    if 0 in array.shape:
        return [f"{name} has shape {list(array.shape)}, which holds nothing"]
    return []


def _mismatches(parameter: Parameter, array: Any, sizes: dict[str, tuple[Any, str]]) -> list[str]:
    """Where an array contradicts those before it, whose sizes are added to."""
    letters, shape = list(parameter.letters), list(array.shape)
    if letters[0] == "...":
        split = len(shape) - len(letters) + 1
        shape = [tuple(shape[:split]), *shape[split:]]
    reasons = []
    for letter, size in zip(letters, shape, strict=True):
        if letter.startswith("_"):
            continue
        known, owner = sizes.setdefault(letter, (size, parameter.name))
        if known != size:
            reasons.append(
                f"{parameter.name} is {_shown(parameter.letters)} = {list(array.shape)}, but "
                f"{letter} is {known} in {owner}"
            )
    return reasons


def _shown(letters: tuple[str, ...]) -> str:
    return f"[{' '.join(letter.removeprefix('_') for letter in letters)}]"
