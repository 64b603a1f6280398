"""Weights in codes of 3, 4 or 8 bits: the tensor, recipes and schemes that say what is one.

Names are loaded on first use: who reads a scheme alone does not wait for JAX.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pallas_kernels.dequant_matmul.qtensor import QTensor as QTensor

    from .abstract import abstract_qtensor as abstract_qtensor
    from .abstract import in_codes as in_codes
    from .activations import ActivationFormat as ActivationFormat
    from .activations import fake_quantise as fake_quantise
    from .recipe import RECIPES as RECIPES
    from .recipe import Method as Method
    from .recipe import Recipe as Recipe
    from .recipe import Rule as Rule
    from .recipe import WeightFormat as WeightFormat
    from .recipe import named_recipe as named_recipe
    from .scheme import Scheme as Scheme
    from .scheme import TensorScheme as TensorScheme
    from .size import Size as Size
    from .size import TensorSize as TensorSize
    from .size import by_part as by_part
    from .size import scheme_of as scheme_of
    from .size import tensor_sizes as tensor_sizes

_HOME = {
    "pallas_kernels.dequant_matmul.qtensor": ("QTensor",),
    "qwen_jax.quant.abstract": ("abstract_qtensor", "in_codes"),
    "qwen_jax.quant.activations": ("ActivationFormat", "fake_quantise"),
    "qwen_jax.quant.recipe": (
        "RECIPES",
        "Method",
        "Recipe",
        "Rule",
        "WeightFormat",
        "named_recipe",
    ),
    "qwen_jax.quant.scheme": ("Scheme", "TensorScheme"),
    "qwen_jax.quant.size": ("Size", "TensorSize", "by_part", "scheme_of", "tensor_sizes"),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}
__all__ = list(_MODULE_OF)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value
