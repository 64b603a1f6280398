"""int8 matrices of compressed-tensors (`int-quantized`): one byte a weight.

`weight` int8 [O, I] with `weight_scale`, one for the matrix, one a row, or by groups or blocks, and
perhaps `weight_zero_point` int8 of the same shape.

    W[o, i] = (code - zero) * scale
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from qwen_jax.checkpoint.header import TensorInfo
from qwen_jax.checkpoint.problems import show
from qwen_jax.checkpoint.safetensors_io import TensorFolder
from qwen_jax.errors import CheckpointError

from .blocks import Block, BlockSettings, scale_block
from .packing import dequantise, group_map
from .quantised import (
    SCALE_DTYPES,
    Parts,
    Quantised,
    as_scales,
    check_dtype,
    check_shape,
    keys,
    sides,
)


@dataclass(frozen=True)
class Int8Matrix(Quantised):
    """An int8 matrix [out, in]; `block` is the rows and columns that one scale covers."""

    block: Block
    symmetric: bool
    scale: TensorInfo
    zero: TensorInfo | None

    def read(self, folder: TensorFolder, start: int, stop: int) -> np.ndarray:
        """Dequantises some output features; see `Quantised.read`."""
        codes = folder.read(self.parts[0], slice(start, stop))
        inputs = self.shape[1]
        blocks = (-1, -(-inputs // self.block[1]))
        of_row = np.arange(start, stop) // self.block[0]
        scales = as_scales(folder.read(self.scale.name), self.scale).reshape(blocks)
        zeros = 0.0
        if self.zero is not None:
            zeros = folder.read(self.zero.name).astype(np.float32).reshape(blocks)
            check_symmetry(self.zero, zeros, self.symmetric)
            zeros = zeros[of_row]
        groups = group_map(None, self.block[1], inputs)
        return dequantise(lambda low, high: codes[low:high], zeros, scales[of_row], groups, inputs)


def check_symmetry(info: TensorInfo, zeros: np.ndarray, symmetric: bool) -> None:
    """Refuses zero points other than 0 where the configuration says that there are none.

    Raises:
        CheckpointError: there are some.
    """
    if symmetric and zeros.any():
        raise CheckpointError(
            f"{show(info.name)} holds zero points other than 0, but the configuration says "
            "symmetric; readers would disagree about this file"
        )


def match(parts: Parts, settings: BlockSettings, symmetric: bool) -> Int8Matrix:
    """Makes an int8 matrix of its tensors.

    Args:
        parts: `weight`, `weight_scale` and perhaps `weight_zero_point`.
        settings: block sizes that the configuration allows.
        symmetric: whether the configuration says that zero points are 0.

    Returns:
        The matrix; no data has been read.

    Raises:
        CheckpointError: parts that are missing, superfluous, or do not fit one another.
    """
    weight, scale = parts.take("weight", "weight_scale")
    parts.only("weight", "weight_scale", "weight_zero_point")
    zero = parts.tensors.get("weight_zero_point")
    shape = sides(weight, ("I8",))
    check_dtype(scale, SCALE_DTYPES)
    if zero is not None:
        check_dtype(zero, ("I8",))
        check_shape(zero, scale.shape, "one a scale")
    block = scale_block(parts, shape, scale.shape, settings, inverse=False)
    return Int8Matrix(
        parts.key, shape, keys(weight, scale, zero), "int8", block, symmetric, scale, zero
    )
