"""The Triton implementation: what it takes, and its kernel."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float

from .._compat import Target, current_target, triton_call, triton_refusals
from . import reference
from .config import Config, config_for
from .reference import NormOutput
from .specs import DTYPES, MOST_WIDTH


def refusals(
    target: Target,
    x: Any,
    weight: Any,
    y: Any,
    gate: Any,
    *,
    eps: float,
    zero_centred: bool,
    dtype: Any,
) -> list[str]:
    """Why the kernel does not take a call; see `dispatch.Implementation`."""
    reasons = triton_refusals(target)
    reasons += reference.refusals(
        target, x, weight, y, gate, eps=eps, zero_centred=zero_centred, dtype=dtype
    )
    dtypes = {"x": x.dtype, "weight": weight.dtype, "the result": dtype}
    dtypes |= {name: z.dtype for name, z in (("y", y), ("gate", gate)) if z is not None}
    for name, found in dtypes.items():
        if str(found) not in DTYPES:
            reasons.append(f"{name} is {found}, not {' or '.join(DTYPES)}")
    if x.shape[-1] > MOST_WIDTH:
        reasons.append(f"rows of x have {x.shape[-1]} numbers, more than {MOST_WIDTH}")
    if x.size >= 2**31:
        reasons.append(f"x has {x.size} numbers, 2^31 or more")
    return reasons


def rms_norm(
    x: Float[Array, "... D"],
    weight: Float[Array, " D"],
    y: Float[Array, "... D"] | None,
    gate: Float[Array, "... D"] | None,
    *,
    eps: float,
    zero_centred: bool,
    dtype: Any,
    config: Config | None = None,
) -> NormOutput:
    """See `api.add_rms_norm` and `api.gated_rms_norm`; `config` is chosen by shape if None.

    A program reads whole rows and keeps them in registers, so each number is read once.
    """
    width = x.shape[-1]
    rows = x.size // width
    if config is None:
        config = config_for(current_target(), x)
    block = (config.rows, pl.next_power_of_2(width))

    def kernel(*refs: Any) -> None:
        x_ref, weight_ref = refs[:2]
        y_ref = None if y is None else refs[2]
        gate_ref = None if gate is None else refs[given - 1]
        row = pl.program_id(0) * block[0] + jax.lax.broadcasted_iota(jnp.int32, block, 0)
        column = jax.lax.broadcasted_iota(jnp.int32, block, 1)
        inside = None
        if rows % block[0] or width != block[1]:
            inside = (row < rows) & (column < width)

        def load(ref: Any, *at: Array) -> Array:
            other = None if inside is None else 0.0
            return plt.load(ref.at[at], mask=inside, other=other).astype(jnp.float32)

        def store(ref: Any, value: Array) -> None:
            plt.store(ref.at[row, column], value.astype(ref.dtype), mask=inside)

        wide, scale = load(x_ref, row, column), load(weight_ref, column)
        if zero_centred:
            scale += 1.0
        if y_ref is not None:
            wide = _rounded(wide + _rounded(load(y_ref, row, column), x.dtype), x.dtype)
            store(refs[-1], wide)
        mean = jnp.sum(wide * wide, axis=1, keepdims=True) / width
        normal = wide * jax.lax.rsqrt(mean + eps)
        if gate_ref is None:
            store(refs[given], normal * scale)
        else:
            opened = load(gate_ref, row, column)
            opened *= jax.lax.logistic(opened)
            store(refs[given], _rounded(normal, x.dtype) * scale * opened)

    arrays = [z.reshape(rows, width) for z in (y, gate) if z is not None]
    arrays = [x.reshape(rows, width), weight, *arrays]
    given = len(arrays)
    out = [jax.ShapeDtypeStruct((rows, width), dtype)]
    if y is not None:
        out.append(jax.ShapeDtypeStruct((rows, width), x.dtype))
    normal, *total = triton_call(
        kernel,
        num_warps=config.num_warps,
        num_stages=1,
        name="rms_norm",
        grid=(pl.cdiv(rows, block[0]),),
        out_shape=out,
    )(*arrays)
    return NormOutput(normal.reshape(x.shape), total[0].reshape(x.shape) if total else None)


def _rounded(x: Float[Array, "r d"], dtype: Any) -> Float[Array, "r d"]:
    """Float32 numbers that `dtype` has."""
    return x.astype(dtype).astype(jnp.float32)
