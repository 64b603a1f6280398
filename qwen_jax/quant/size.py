"""What a recipe does to a model: which tensors become codes, and bytes before and after."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Literal, get_args

import jax

from ..errors import RequestError
from .abstract import in_codes, nbytes, why_not
from .recipe import EMBEDDING, HEAD, Recipe
from .scheme import Scheme, TensorScheme

Part = Literal["experts", "dense", "head", "embedding", "kept"]

_SHOWN = 20


@dataclasses.dataclass(frozen=True)
class TensorSize:
    """One tensor of the tree.

    Attributes:
        path: its place.
        part: what it belongs to; `kept` for all that is not in codes.
        values: how many numbers it holds.
        before: bytes as it was.
        after: bytes as the scheme has it, scales and the last unit's padding included.
    """

    path: str
    part: Part
    values: int
    before: int
    after: int


@dataclasses.dataclass(frozen=True)
class Size:
    """Some tensors together.

    Attributes:
        values: how many numbers they hold.
        before: bytes as they were.
        after: bytes as the scheme has them.
    """

    values: int
    before: int
    after: int

    @property
    def bits_per_value(self) -> float:
        """Bits that a number takes afterwards, on average."""
        return 8 * self.after / self.values

    @classmethod
    def of(cls, tensors: Iterable[TensorSize]) -> Size:
        """The sum."""
        tensors = tuple(tensors)
        return cls(*(sum(getattr(t, f.name) for t in tensors) for f in dataclasses.fields(cls)))


def scheme_of(tree: Mapping[str, jax.ShapeDtypeStruct], recipe: Recipe) -> Scheme:
    """The tensors of a model that a recipe puts into codes.

    Args:
        tree: the model's tensors by tree path, as from `checkpoint.abstract_parameters`.
        recipe: what to do.

    Raises:
        RequestError: the recipe wants what cannot be: a group larger than a tensor's inputs, or
            codes for what is no matrix; or it matches nothing. One error names all such tensors.
    """
    tensors, faults = {}, []
    for path, leaf in tree.items():
        rule = recipe.rule(path)
        if rule is None or rule.format is None:
            continue
        tensors[path] = TensorScheme(rule.format)
        if fault := why_not(path, leaf.shape, rule.format.group_size):
            faults.append(fault)
    if faults:
        more = f"; and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        raise RequestError(
            f"recipe {recipe.name} does not fit the model: {'; '.join(faults[:_SHOWN])}{more}. "
            "Accepted are embedding, head, experts and the other matrices but for the router, in "
            "groups no larger than their inputs; write a recipe of your own (a JSON file) with "
            "smaller groups or narrower patterns"
        )
    if not tensors:
        raise RequestError(
            f"recipe {recipe.name} puts no tensor of the model in codes; its patterns are "
            f"{', '.join(rule.pattern for rule in recipe.rules)}"
        )
    return Scheme(recipe.name, tensors)


def tensor_sizes(
    tree: Mapping[str, jax.ShapeDtypeStruct], scheme: Scheme
) -> tuple[TensorSize, ...]:
    """Bytes of each tensor.

    Args:
        tree: the tensors by tree path as they were, of the dtypes that are counted as before, and
            as after where a tensor is not in codes.
        scheme: what becomes of them.
    """
    after = in_codes(tree, scheme)
    return tuple(
        TensorSize(
            path, _part(path, scheme), math.prod(leaf.shape), nbytes(leaf), nbytes(after[path])
        )
        for path, leaf in tree.items()
    )


def by_part(tensors: Iterable[TensorSize]) -> dict[Part, Size]:
    """Totals of each part that there is."""
    groups: dict[Part, list[TensorSize]] = {part: [] for part in get_args(Part)}
    for tensor in tensors:
        groups[tensor.part].append(tensor)
    return {part: Size.of(members) for part, members in groups.items() if members}


def _part(path: str, scheme: Scheme) -> Part:
    if path not in scheme.tensors:
        return "kept"
    if ".mlp.experts." in path:
        return "experts"
    named: dict[str, Part] = {HEAD: "head", EMBEDDING: "embedding"}
    return named.get(path, "dense")
