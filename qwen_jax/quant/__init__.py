"""Weights in codes of 3, 4 or 8 bits: the tensor, and recipes that say what becomes one."""

from pallas_kernels.dequant_matmul.qtensor import QTensor

from .recipe import RECIPES, Method, Recipe, Rule, WeightFormat

__all__ = ["RECIPES", "Method", "QTensor", "Recipe", "Rule", "WeightFormat"]
