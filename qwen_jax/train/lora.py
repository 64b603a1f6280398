"""LoRA: a matrix changes by the product of two thin ones, W + (alpha / rank) B A.

Hu et al. (arXiv 2106.09685). It holds for every matrix of the tree alike, read by a `Linear` or
not: projections, routers, embeddings, and stacks of experts, which get a product for each expert.
The changed matrices are made in each step, and merging makes them once more: what was trained is
what is stored. Beside the model they take the memory of those matrices, but not of their moments.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ..errors import RequestError
from ..quant import QTensor
from ..whole_number import check_whole
from .parameters import Parameters

DOWN, UP = "lora_A", "lora_B"


@dataclasses.dataclass(frozen=True)
class Lora:
    """Which matrices change, and how far.

    Attributes:
        targets: patterns of tree paths, such as `*.self_attn.*_proj.weight` or `*.experts.*`.
        rank: of the change.
        alpha: the change is alpha / rank times the product.

    Raises:
        RequestError: a number outside its range.
    """

    targets: tuple[str, ...] = ("*_proj.weight", "*_proj")
    rank: int = 8
    alpha: float = 16.0

    def __post_init__(self) -> None:
        check_whole("rank", self.rank, 1)
        if not 0 < self.alpha < math.inf:
            raise RequestError(f"alpha is {self.alpha}; accepted is a number above 0")

    def start(self, parameters: Parameters, key: Array) -> Parameters:
        """The thin matrices: A normal with variance 1 / inputs, B zero, so that nothing changes.

        Args:
            parameters: of the model, which stay as they are.
            key: of the draw.

        Returns:
            Float32 `PATH.lora_A` [*, rank, I] and `PATH.lora_B` [*, O, rank].

        Raises:
            RequestError: a pattern without a matrix, a matrix in codes, or a rank above a width.
        """
        thin = {}
        for number, path in enumerate(_matching(parameters, self.targets)):
            *stack, outputs, inputs = parameters[path].shape
            if self.rank > min(outputs, inputs):
                raise RequestError(
                    f"rank is {self.rank}, but {path} is {outputs} x {inputs}; give a rank of at "
                    f"most {min(outputs, inputs)}, or leave this matrix out"
                )
            ours = jax.random.fold_in(key, number)
            down = jax.random.normal(ours, (*stack, self.rank, inputs)) * jnp.float32(inputs**-0.5)
            thin[f"{path}.{DOWN}"] = down
            thin[f"{path}.{UP}"] = jnp.zeros((*stack, outputs, self.rank), jnp.float32)
        return thin

    def merged(self, thin: Parameters, parameters: Parameters) -> Parameters:
        """The parameters with the changes in them, float32 where changed.

        This is a trainer's `assemble`; what is trained are the thin matrices.

        Args:
            thin: from `start`, or trained since.
            parameters: what `start` was given.
        """
        scale = jnp.float32(self.alpha / self.rank)
        changed = {}
        for name, down in thin.items():
            if not name.endswith(DOWN):
                continue
            path = name.removesuffix(f".{DOWN}")
            product = jnp.einsum("...or,...ri->...oi", thin[f"{path}.{UP}"], down)
            changed[path] = parameters[path].astype(jnp.float32) + scale * product
        return {**parameters, **changed}


def _matching(parameters: Mapping[str, Array | QTensor], patterns: Sequence[str]) -> list[str]:
    """Paths of the matrices that patterns name, in the tree's order."""
    named: set[str] = set()
    for pattern in patterns:
        found = [n for n in fnmatch.filter(parameters, pattern) if _is_matrix(n, parameters[n])]
        if not found:
            raise RequestError(
                f"no matrix matches {pattern!r}; accepted are patterns of tree paths, such as "
                "*.self_attn.q_proj.weight, where matrices are no convolutions and not in codes"
            )
        named.update(found)
    return [name for name in parameters if name in named]


def _is_matrix(name: str, value: Array | QTensor) -> bool:
    plain = not isinstance(value, QTensor) and not name.endswith("conv1d.weight")
    return plain and len(value.shape) >= 2
