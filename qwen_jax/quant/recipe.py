"""Recipes: which tensors become codes, of how many bits, and by what method."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from pallas_kernels.dequant_matmul.layout import BITS, GROUP_SIZES

from ..errors import RequestError

Method = Literal["round-to-nearest", "activation-aware", "gptq"]


@dataclass(frozen=True)
class WeightFormat:
    """How a tensor is stored in codes.

    Attributes:
        bits: 3, 4 or 8.
        group_size: inputs that share a scale: 32, 64 or 128.
        symmetric: whether groups have no zero points.
    """

    bits: int
    group_size: int
    symmetric: bool = True

    def __post_init__(self):
        if self.bits not in BITS:
            raise RequestError(f"bits is {self.bits!r}; accepted are {BITS}")
        if self.group_size not in GROUP_SIZES:
            raise RequestError(f"group_size is {self.group_size!r}; accepted are {GROUP_SIZES}")


@dataclass(frozen=True)
class Rule:
    """What becomes of the tensors whose tree paths match a pattern.

    Attributes:
        pattern: of tree paths, as in a shell: `*.mlp.experts.*`.
        format: of the codes; None leaves the tensors as they are.
        method: how codes are chosen where there is calibration text.
    """

    pattern: str
    format: WeightFormat | None
    method: Method = "gptq"

    def __post_init__(self):
        if self.method not in get_args(Method):
            raise RequestError(f"method is {self.method!r}; accepted are {get_args(Method)}")


@dataclass(frozen=True)
class Recipe:
    """An ordered list of rules; the first one that matches a tensor decides.

    A tensor that no rule matches stays as it is: the router, norms, convolutions, `A_log`,
    `dt_bias`, `in_proj_a` and `in_proj_b`, and the shared expert's gate in all named recipes.
    """

    name: str
    rules: tuple[Rule, ...]

    def rule(self, path: str) -> Rule | None:
        """The rule for a tree path; None where the tensor stays as it is."""
        for rule in self.rules:
            if fnmatch.fnmatchcase(path, rule.pattern):
                return None if rule.format is None else rule
        return None


EXPERTS = "*.mlp.experts.*"
SHARED = "*.mlp.shared_expert.*_proj.weight"
DENSE_MLP = "*.mlp.*_proj.weight"
ATTENTION = "*.self_attn.[qkvo]_proj.weight"
DELTA_INPUTS = "*.linear_attn.in_proj_[qz]*.weight"
DELTA_OUTPUT = "*.linear_attn.out_proj.weight"
HEAD, EMBEDDING = "lm_head.weight", "embed_tokens.weight"


def _uniform(name: str, bits: int, group_size: int) -> Recipe:
    patterns = (EXPERTS, DENSE_MLP, ATTENTION, DELTA_INPUTS, DELTA_OUTPUT, HEAD, EMBEDDING)
    return Recipe(name, tuple(Rule(p, WeightFormat(bits, group_size)) for p in patterns))


def named_recipe(name: str) -> Recipe:
    """The recipe of a name.

    Raises:
        RequestError: there is none; the message lists the names.
    """
    if name not in RECIPES:
        raise RequestError(f"there is no recipe {name!r}; accepted are {', '.join(RECIPES)}")
    return RECIPES[name]


RECIPES: Mapping[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            "q3",
            (
                Rule(EXPERTS, WeightFormat(3, 64)),
                Rule(SHARED, WeightFormat(8, 64)),
                Rule(DENSE_MLP, WeightFormat(3, 64)),
                Rule(ATTENTION, WeightFormat(4, 64)),
                Rule(DELTA_INPUTS, WeightFormat(4, 64)),
                Rule(DELTA_OUTPUT, WeightFormat(8, 64)),
                Rule(HEAD, WeightFormat(4, 32)),
                Rule(EMBEDDING, WeightFormat(4, 32), "round-to-nearest"),
            ),
        ),
        Recipe(
            "q3-small",
            (
                Rule(EXPERTS, WeightFormat(3, 128)),
                Rule(SHARED, WeightFormat(4, 128)),
                Rule(DENSE_MLP, WeightFormat(3, 128)),
                Rule(ATTENTION, WeightFormat(4, 128)),
                Rule(DELTA_INPUTS, WeightFormat(4, 128)),
                Rule(DELTA_OUTPUT, WeightFormat(4, 128)),
                Rule(HEAD, WeightFormat(4, 128)),
                Rule(EMBEDDING, WeightFormat(4, 128), "round-to-nearest"),
            ),
        ),
        _uniform("q4", 4, 64),
        _uniform("q8", 8, 128),
        Recipe("experts-only", (Rule(EXPERTS, WeightFormat(3, 64)),)),
    )
}
