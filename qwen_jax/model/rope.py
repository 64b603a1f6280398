"""Rotary position embedding: frequencies with their scaling, and tables of angles.

Su et al., "RoFormer" (arXiv 2104.09864); YaRN: Peng et al. (arXiv 2309.00071). Text has three equal
position rows, so the multi-axis form of qwen3_5 (`mrope_section`) is the ordinary one here.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ..config import QwenConfig
from ..configuration.rope_parameters import RopeParameters


class Rotary(NamedTuple):
    """Cosines and sines of every new token, float32, one column a pair of rotated dimensions."""

    cos: Float[Array, "B T R2"]
    sin: Float[Array, "B T R2"]


def rotary(config: QwenConfig, positions: Int[Array, "B T"]) -> Rotary:
    """The tables for these positions (negative ones, padding, count as 0)."""
    frequencies, scale = inverse_frequencies(config.rope_parameters, config.rotary_dim)
    angles = jnp.maximum(positions, 0).astype(jnp.float32)[..., None] * frequencies[None, None, :]
    return Rotary(jnp.cos(angles) * scale, jnp.sin(angles) * scale)


def inverse_frequencies(rope: RopeParameters, width: int) -> tuple[np.ndarray, float]:
    """Inverse frequencies [width / 2] in float32, and the factor on cosines and sines.

    Args:
        rope: scaling of type `default`, `linear` or `yarn`.
        width: number of rotated dimensions, R.
    """
    plain = rope.rope_theta ** (-np.arange(0, width, 2, dtype=np.float64) / width)
    if rope.rope_type == "default":
        return plain.astype(np.float32), 1.0
    if rope.rope_type == "linear":
        return (plain / rope.factor).astype(np.float32), 1.0
    ramp = _yarn_ramp(rope, width)
    mixed = plain / rope.factor * ramp + plain * (1 - ramp)
    return mixed.astype(np.float32), _yarn_attention_factor(rope)


def _yarn_ramp(rope: RopeParameters, width: int) -> np.ndarray:
    """0 where a dimension turns often in the original context (kept), 1 where it hardly turns."""
    original = rope.original_max_position_embeddings
    if original is None:
        raise ValueError("yarn needs original_max_position_embeddings; QwenConfig.from_hf fills it")

    def dimension_that_turns(times: float) -> float:
        return width * math.log(original / (times * 2 * math.pi)) / (2 * math.log(rope.rope_theta))

    low = dimension_that_turns(rope.beta_fast)
    high = dimension_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    if low == high:
        high += 0.001
    return np.clip((np.arange(width // 2, dtype=np.float64) - low) / (high - low), 0, 1)


def _yarn_attention_factor(rope: RopeParameters) -> float:
    def scale(mscale: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * mscale * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)
