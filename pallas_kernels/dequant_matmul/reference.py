"""The definition in plain jax.numpy."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt

from .._compat import Target
from .layout import BITS, GROUP_SIZES, UNIT, dequantise, group_count, unit_count

# The head of a large vocabulary would be gigabytes.
_VALUES_AT_ONCE = 1 << 26


def dequant_matmul(
    x: Float[Array, "... I"],
    codes: UInt[Array, "O Q U"],
    scale: Float[Array, "O J"],
    zero: Float[Array, "O J"] | None = None,
    *,
    group_size: int,
    dtype: Any,
) -> Float[Array, "... O"]:
    """See `api.dequant_matmul`."""
    wide = x.astype(jnp.float32)

    def product(part: tuple[Array, Array, Array | None]) -> Float[Array, "... O"]:
        weight = dequantise(*part, x.shape[-1], group_size)
        return jnp.einsum("...i,oi->...o", wide, weight, precision=jax.lax.Precision.HIGHEST)

    parts = codes, scale, zero
    at_once = max(1, _VALUES_AT_ONCE // x.shape[-1])
    if codes.shape[0] <= at_once:
        return product(parts).astype(dtype)
    # One output of a part is a matrix of one row.
    rows = jax.lax.map(
        lambda part: product(jax.tree.map(lambda leaf: leaf[None], part))[..., 0].astype(dtype),
        parts,
        batch_size=at_once,
    )
    return jnp.moveaxis(rows, 0, -1)


def refusals(
    target: Target,
    x: Any,
    codes: Any,
    scale: Any,
    zero: Any = None,
    *,
    group_size: int,
    dtype: Any,
) -> list[str]:
    """What gives a call no meaning; see `dispatch.Implementation`."""
    reasons = []
    inputs, (_, bits, units) = x.shape[-1], codes.shape
    if bits not in BITS:
        reasons.append(f"codes have {bits} words for 32 values; accepted is 3, 4 or 8")
    if units != unit_count(inputs):
        reasons.append(
            f"codes have {units} units of {UNIT} values a row; {inputs} inputs need "
            f"{unit_count(inputs)}"
        )
    if group_size not in GROUP_SIZES:
        reasons.append(f"group_size is {group_size!r}; accepted is 32, 64 or 128")
    elif scale.shape[-1] != group_count(inputs, group_size):
        reasons.append(
            f"scale has {scale.shape[-1]} groups a row; {inputs} inputs in groups of {group_size} "
            f"need {group_count(inputs, group_size)}"
        )
    if not jnp.issubdtype(dtype, jnp.floating):
        reasons.append(f"dtype is {dtype}; accepted is floating point")
    return reasons
