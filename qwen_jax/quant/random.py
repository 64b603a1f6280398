"""Random tensors in codes, for benchmarks and tests."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from pallas_kernels.dequant_matmul.layout import CENTRES, UNIT, pack
from pallas_kernels.dequant_matmul.qtensor import QTensor


@functools.partial(jax.jit, static_argnames=("like", "deviation"))
def random_qtensor(like: QTensor, deviation: float, key: Array) -> QTensor:
    """A tensor whose codes are all equally likely.

    Args:
        like: shapes and dtypes.
        deviation: standard deviation of the numbers that it stands for; their mean is about 0.
        key: from `jax.random.key`.
    """
    bits, codes = like.bits, jax.random.bits(key, like.codes.shape, jnp.uint32)
    if like.inputs % UNIT:
        used = jnp.asarray(pack(np.full(like.inputs, 2**bits - 1, np.uint8), bits))
        codes = codes & jnp.broadcast_to(used, codes.shape)
    # The variance of n equally likely integers is (n^2 - 1) / 12.
    step = deviation / ((4**bits - 1) / 12) ** 0.5
    zero, factor = like.zero, like.input_scale
    return QTensor(
        codes,
        jnp.full(like.scale.shape, step, like.scale.dtype),
        None if zero is None else jnp.full(zero.shape, CENTRES[bits], zero.dtype),
        None if factor is None else jnp.ones(factor.shape, factor.dtype),
        like.inputs,
        like.group_size,
    )
