"""Tensors in codes as files hold them."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels.dequant_matmul.layout import pack
from qwen_jax.checkpoint.problems import show
from qwen_jax.quant import TensorScheme

from ..methods import Solved, TensorReport

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
    """Packs what a method found.

    Args:
        path: the tensor's, for messages.
        solved: its codes.
        scheme: how it was announced to be stored.

    Raises:
        RuntimeError: a method gave something else than the scheme says; a mistake of its code.
    """
    values, scale = np.asarray(solved.codes.values), np.asarray(solved.codes.scale)
    zero, factor = solved.codes.zero, solved.input_scale
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
    return Packed(
        _packed_values(values, scheme.format.bits),
        scale.astype(narrow),
        None if zero is None else np.asarray(zero).astype(narrow),
        None if factor is None else np.asarray(factor, np.float32),
        solved.report,
    )


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
