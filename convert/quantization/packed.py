"""Tensors in codes as files hold them."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels.dequant_matmul.layout import pack, unpack
from qwen_jax.checkpoint.problems import show
from qwen_jax.quant import TensorScheme

from ..methods import Codes, Solved, TensorReport

_VALUES_AT_ONCE = 16 << 20
_WORTH_COMPILING = 4 << 20
_pack = jax.jit(pack, static_argnums=1)


class Packed(NamedTuple):
    """One tensor in codes, or some of its rows, as NumPy arrays.

    Attributes:
        codes: uint32 [*, O, Q, U].
        scale: bfloat16 [*, O, J].
        zero: bfloat16 [*, O, J]; None in a symmetric format.
        input_scale: float32 [*, I]; None where inputs have no factor.
        report: what to say of it.
    """

    codes: np.ndarray
    scale: np.ndarray
    zero: np.ndarray | None
    input_scale: np.ndarray | None
    report: TensorReport


def packed(path: str, solved: Solved, scheme: TensorScheme) -> Packed:
    """Packs what a method found; see `packed_parts`."""
    parts = packed_parts(path, solved.codes, solved.input_scale, scheme)
    return Packed(**{"zero": None, "input_scale": None, **parts}, report=solved.report)


def packed_parts(
    path: str, codes: Codes, input_scale: Any, scheme: TensorScheme
) -> dict[str, np.ndarray]:
    """The arrays of a tensor in codes, by the names in `TensorScheme.parts`.

    Args:
        path: the tensor's, for messages.
        codes: what it became.
        input_scale: a factor of each input; None where there is none.
        scheme: how it was announced to be stored.

    Raises:
        RuntimeError: a method gave something else than the scheme says; a mistake of its code.
    """
    values, scale = np.asarray(codes.values), np.asarray(codes.scale)
    zero, factor = codes.zero, input_scale
    if scheme.input_scale and factor is None:
        # Every tensor of a stack or of a model has the same parts, whatever data it met.
        factor = np.ones((*values.shape[:-2], values.shape[-1]), np.float32)
    announced = (scheme.format.symmetric, scheme.input_scale)
    if (zero is None, factor is not None) != announced or not (scale > 0).all():
        raise RuntimeError(
            f"internal error: {show(path)} was announced as {scheme}; its codes have zero points: "
            f"{zero is not None}, factors of inputs: {factor is not None}, least scale "
            f"{scale.min()}"
        )
    narrow = ml_dtypes.bfloat16
    parts = {"codes": _packed_values(values, scheme.format.bits), "scale": scale.astype(narrow)}
    if zero is not None:
        parts["zero"] = np.asarray(zero).astype(narrow)
    if factor is not None:
        parts["input_scale"] = np.asarray(factor, np.float32)
    return parts


def unpacked(codes: np.ndarray, inputs: int) -> np.ndarray:
    """Values of a matrix, or of a stack, matrix by matrix: unpacking takes several times that."""
    if codes.ndim == 3:
        return unpack(codes, inputs)
    return np.stack([unpack(matrix, inputs) for matrix in codes])


def _packed_values(values: np.ndarray, bits: int) -> np.ndarray:
    """Packs on the device, some rows at a time: there a row takes several times its memory."""
    if values.size < _WORTH_COMPILING:
        return pack(values, bits)
    flat = values.reshape(-1, values.shape[-1])
    step = max(1, _VALUES_AT_ONCE // values.shape[-1])
    parts = [
        np.asarray(_pack(jnp.asarray(flat[start : start + step]), bits))
        for start in range(0, len(flat), step)
    ]
    return np.concatenate(parts).reshape(*values.shape[:-1], bits, -1)
