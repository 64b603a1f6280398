"""Weights in codes of 3, 4 or 8 bits: the tensor, recipes and schemes that say what is one."""

from pallas_kernels.dequant_matmul.qtensor import QTensor

from .recipe import RECIPES, Method, Recipe, Rule, WeightFormat
from .scheme import Scheme, TensorScheme

__all__ = [
    "RECIPES",
    "Method",
    "QTensor",
    "Recipe",
    "Rule",
    "Scheme",
    "TensorScheme",
    "WeightFormat",
]
