"""A model's parameters as a flat dict, which is what optimisers, filters and checkpoints handle."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from ..config import QwenConfig
from ..errors import RequestError
from ..model import CausalLM
from ..quant import QTensor

Parameters = dict[str, Any]
"""Tree path -> array, or `QTensor` where a matrix is in codes."""


@dataclasses.dataclass(frozen=True)
class Skeleton:
    """A model without its arrays: static, so that a compiled function can close over it.

    Attributes:
        config: the model's, whose dtype is that of the computation.
        graph: what NNX needs to put the model together.
        variables: of each parameter its tree path, NNX's kind of variable, and the dtype in the
            computation; None for what stays as it is, codes and numbers that are not floating.
    """

    config: QwenConfig
    graph: Any
    variables: tuple[tuple[str, type[nnx.Variable], Any], ...]

    @classmethod
    def of(cls, model: CausalLM) -> Skeleton:
        """That of a model, which may hold shapes only."""
        graph, state = nnx.split(model)
        found = [
            (_name(path), type(leaf), leaf.get_value().dtype if _floats(leaf.get_value()) else None)
            for path, leaf in nnx.to_flat_state(state)
        ]
        return cls(model.config, graph, tuple(found))

    def filled(self, parameters: Mapping[str, Any]) -> CausalLM:
        """The model with these parameters, each rounded to its dtype of the computation."""
        flat = []
        for name, kind, dtype in self.variables:
            value = parameters[name]
            flat.append((_path(name), kind(value if dtype is None else value.astype(dtype))))
        return nnx.merge(self.graph, nnx.from_flat_state(flat))


class Split(NamedTuple):
    """Parameters that a run changes, and those that it leaves as they are."""

    trained: Parameters
    fixed: Parameters


def parameters_of(model: CausalLM) -> Parameters:
    """The arrays of a model by tree path; nothing is copied."""
    flat = nnx.to_flat_state(nnx.state(model))
    return {_name(path): leaf.get_value() for path, leaf in flat}


def masters(parameters: Mapping[str, Array]) -> Parameters:
    """Float32 copies, which an optimiser changes; steps too small for bfloat16 add up in them."""
    return {name: jnp.array(value, jnp.float32) for name, value in parameters.items()}


def split(parameters: Parameters, patterns: Sequence[str] = ("*",)) -> Split:
    """Parts those that patterns of tree paths name from the others; routers are `*.mlp.gate.*`.

    Numbers that are not floating, such as counters of a router of one's own, are never trained.

    Args:
        parameters: of a model.
        patterns: as in a shell: `*` stands for anything, dots included.

    Raises:
        RequestError: a pattern that no tree path matches, or one that names a matrix in codes.
    """
    for pattern in patterns:
        if not fnmatch.filter(parameters, pattern):
            raise RequestError(
                f"no parameter matches {pattern!r}; accepted are tree paths such as "
                f"{', '.join(list(parameters)[:3])}, with * for anything"
            )
    chosen = {n for pattern in patterns for n in fnmatch.filter(parameters, pattern)}
    coded = sorted(n for n in chosen if isinstance(parameters[n], QTensor))
    if coded:
        raise RequestError(
            f"{', '.join(coded[:3])}{' ...' * (len(coded) > 3)}: in codes, which have no gradient; "
            "train the float model, or other parameters only"
        )
    chosen = {name for name in chosen if _floats(parameters[name])}
    return Split(
        {name: value for name, value in parameters.items() if name in chosen},
        {name: value for name, value in parameters.items() if name not in chosen},
    )


def count(parameters: Mapping[str, Any]) -> int:
    """How many numbers they are."""
    return sum(leaf.size for leaf in jax.tree.leaves(dict(parameters)))


def _floats(value: Any) -> bool:
    return not isinstance(value, QTensor) and jnp.issubdtype(value.dtype, jnp.floating)


def _name(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path))


def _path(name: str) -> tuple[Any, ...]:
    return tuple(int(part) if part.isdecimal() else part for part in name.split("."))
