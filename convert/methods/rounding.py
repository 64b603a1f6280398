"""Rounding to the nearest level, without calibration or with the inputs' importance alone."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pallas_kernels.dequant_matmul.layout import CENTRES
from qwen_jax.quant import WeightFormat

from .codes import SMALLEST_SCALE, Codes, as_stored, in_groups, nearest

# Shares of a group's largest weight that its outermost level may be. The last but ones matter at 3
# bits only.
SHARES = np.linspace(1.0, 0.4, 49, dtype=np.float32)


@functools.partial(jax.jit, static_argnames=("format", "search"))
def round_to_nearest(
    weight: Float[Array, "*S O I"],
    format: WeightFormat,
    *,
    importance: Float[Array, "*S I"] | None = None,
    search: bool = True,
) -> Codes:
    """Each weight to its nearest level; the scale of each group is searched.

    Args:
        weight: finite.
        format: of the codes.
        importance: of each input, e.g. its mean square; all alike if None.
        search: try smaller scales, which clip the largest weights; else the group's largest weight
            is its outermost level.

    Returns:
        Codes. A group whose weights are all alike, and representable in bfloat16, is exact.
    """
    weight = weight.astype(jnp.float32)
    inputs = weight.shape[-1]
    if importance is None:
        importance = jnp.ones((*weight.shape[:-2], inputs), jnp.float32)
    grouped = in_groups(weight, format.group_size)
    kept = jnp.arange(grouped.shape[-2] * format.group_size) < inputs
    heavy = in_groups(importance.astype(jnp.float32), format.group_size)
    heavy = jnp.where(kept.reshape(heavy.shape[-2:]), heavy, 0.0)[..., None, :, :]
    # All zero: every choice would be as good as any other.
    heavy = heavy + 1e-6 * jnp.mean(heavy, axis=-1, keepdims=True) + 1e-30

    low, high = jnp.min(grouped, axis=-1), jnp.max(grouped, axis=-1)
    bits = format.bits

    def error(scale: Array, zero: Array) -> Array:
        codes = nearest(grouped, scale[..., None], zero[..., None], bits)
        difference = grouped - scale[..., None] * (codes - zero[..., None])
        loss = jnp.sum(heavy * jnp.square(difference), axis=-1)
        return jnp.where(jnp.isnan(loss), jnp.inf, loss)

    def better(best: tuple[Array, Array, Array], scale: Array, zero: Array):
        loss = error(scale, zero)
        wins = loss < best[0]
        return tuple(
            jnp.where(wins, new, old) for new, old in zip((loss, scale, zero), best, strict=True)
        )

    candidate = functools.partial(_levels, low, high, format)
    # The first is finite whatever the weights are, and only a smaller error replaces it.
    scale, zero = _exact(low, high, format)
    best = better((error(scale, zero), scale, zero), *candidate(jnp.float32(1.0)))
    if search:
        shares = jnp.asarray(SHARES)
        best = jax.lax.fori_loop(
            1, len(SHARES), lambda i, best: better(best, *candidate(shares[i])), best
        )
    _, scale, zero = best
    values = nearest(grouped, scale[..., None], zero[..., None], bits).astype(jnp.uint8)
    values = values.reshape(*weight.shape[:-1], -1)[..., :inputs]
    return Codes(values, scale, None if format.symmetric else zero)


def min_max(weight: Float[Array, "*S O I"], format: WeightFormat) -> Float[Array, "*S O I"]:
    """What plain rounding on the integer grid (-4 to 3 at 3 bits) makes of a weight, float32.

    Only something to compare with: no file of this project holds such a grid.
    """
    half = 2 ** (format.bits - 1)
    grouped = in_groups(weight.astype(jnp.float32), format.group_size)
    low, high = jnp.min(grouped, axis=-1), jnp.max(grouped, axis=-1)
    scale = (jnp.maximum(high, -low) / (half - 1))[..., None]
    scale = as_stored(jnp.maximum(scale, SMALLEST_SCALE))
    rounded = scale * jnp.clip(jnp.round(grouped / scale), -half, half - 1)
    return rounded.reshape(*weight.shape[:-1], -1)[..., : weight.shape[-1]]


def _levels(low: Array, high: Array, format: WeightFormat, share: Array) -> tuple[Array, Array]:
    """Scale and zero point that reach over a share of a group's range."""
    centre, last = CENTRES[format.bits], 2**format.bits - 1
    if format.symmetric:
        scale = share * jnp.maximum(high / (last - centre), -low / centre)
        return _positive(scale), jnp.full_like(scale, centre)
    scale = _positive(share * (high - low) / last)
    # Between the ends that are cut off; a zero point in bfloat16 is coarse where it is large.
    zero = as_stored(-(low + 0.5 * (1.0 - share) * (high - low)) / scale)
    return scale, zero


def _exact(low: Array, high: Array, format: WeightFormat) -> tuple[Array, Array]:
    """Scale and zero point that are exact where all weights of a group are alike."""
    largest = jnp.maximum(high, -low)
    if not format.symmetric:
        return _positive(largest), jnp.where(high > 0, 0.0, 1.0)
    centre = CENTRES[format.bits]
    return _positive(largest * (1.0 if centre.is_integer() else 2.0)), jnp.full_like(high, centre)


def _positive(scale: Array) -> Array:
    return as_stored(jnp.maximum(scale, SMALLEST_SCALE))
