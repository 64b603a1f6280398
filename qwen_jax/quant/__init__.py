"""Weights in codes of 3, 4 or 8 bits: the tensor, recipes and schemes that say what is one."""

from pallas_kernels.dequant_matmul.qtensor import QTensor

from .abstract import abstract_qtensor
from .recipe import RECIPES, Method, Recipe, Rule, WeightFormat
from .scheme import Scheme, TensorScheme
from .size import Size, TensorSize, by_part, scheme_of, tensor_sizes

__all__ = [
    "RECIPES",
    "Method",
    "QTensor",
    "Recipe",
    "Rule",
    "Scheme",
    "Size",
    "TensorScheme",
    "TensorSize",
    "WeightFormat",
    "abstract_qtensor",
    "by_part",
    "scheme_of",
    "tensor_sizes",
]
