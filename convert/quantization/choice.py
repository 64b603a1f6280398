"""Which tensors of a model become codes, and by what method each."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass

import jax

from qwen_jax.checkpoint.keys import MTP
from qwen_jax.checkpoint.mapping import EMBEDDING
from qwen_jax.errors import RequestError
from qwen_jax.quant import Method, Recipe, Rule, Scheme, scheme_of

from .folding import Fold, folds

WITHOUT_DATA: Method = "round-to-nearest"
_SCALES_INPUTS: tuple[Method, ...] = ("activation-aware",)


@dataclass(frozen=True)
class Choice:
    """A recipe applied to a model.

    Attributes:
        recipe: the recipe.
        tree: shape and dtype of each tensor as it is, by tree path.
        rules: of the tensors that become codes, with the method that is used.
        scheme: how these will be stored.
        folds: those whose factors of inputs go into other matrices.
    """

    recipe: Recipe
    tree: Mapping[str, jax.ShapeDtypeStruct]
    rules: Mapping[str, Rule]
    scheme: Scheme
    folds: Mapping[str, Fold]

    def input_scale(self, path: str) -> str | None:
        """Where a tensor's factors of inputs are: "kept", in another tensor; None without any."""
        if fold := self.folds.get(path):
            return fold.producer
        return "kept" if self.scheme.tensors[path].input_scale else None

    @property
    def idle(self) -> list[str]:
        """Patterns of the recipe that match no tensor."""
        return [
            rule.pattern
            for rule in self.recipe.rules
            if not any(fnmatch.fnmatchcase(path, rule.pattern) for path in self.tree)
        ]


def choose(
    tree: Mapping[str, jax.ShapeDtypeStruct],
    recipe: Recipe,
    *,
    method: Method | None = None,
    calibrated: bool,
) -> Choice:
    """Applies a recipe to a model.

    Embedding and multi-token prediction head, whose inputs calibration does not see, are rounded
    without data whatever the recipe says.

    Args:
        tree: shape and dtype of each tensor by tree path.
        recipe: what to do.
        method: in place of the method of every rule.
        calibrated: whether there is calibration text; without it all is rounded without data.

    Raises:
        RequestError: what `scheme_of` refuses, or a method that needs calibration text.
    """
    if method is not None:
        if not calibrated and method != WITHOUT_DATA:
            raise RequestError(
                f"method {method} needs calibration text; give --calibration FILE, or leave the "
                f"method out for {WITHOUT_DATA}"
            )
        rules = tuple(dataclasses.replace(rule, method=method) for rule in recipe.rules)
        recipe = dataclasses.replace(recipe, rules=rules)
    scheme = scheme_of(tree, recipe)
    chosen: dict[str, Rule] = {}
    for path in scheme.tensors:
        rule = recipe.rule(path)
        assert rule is not None
        blind = not calibrated or path == EMBEDDING or path.startswith(MTP)
        chosen[path] = dataclasses.replace(rule, method=WITHOUT_DATA) if blind else rule
    folding, tensors = folds(tree, chosen), {}
    for path, tensor in scheme.tensors.items():
        kept = chosen[path].method in _SCALES_INPUTS and path not in folding
        tensors[path] = dataclasses.replace(tensor, input_scale=kept)
    return Choice(recipe, tree, chosen, dataclasses.replace(scheme, tensors=tensors), folding)
