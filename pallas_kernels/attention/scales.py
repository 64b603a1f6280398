"""What gives int8 codes of keys and values their size."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int8

from .rows import flat_rows

LARGEST_CODE = 127


class BlockScales(NamedTuple):
    """Scales of an int8 pool, a token and head each, and the bases that keys are coded against.

    A key is `key_scale * code + key_base`, with the base of its block; a value is
    `value_scale * code`. The base of a block is the key of its first token, as it is rotated. So a
    channel that is far from zero but changes little within a block costs the others no accuracy: a
    bias of the projection, say, in dimensions that turn slowly or not at all. In those that turn
    fast it does cost some.

    Attributes:
        key_scale: [P, K, Z] float32.
        value_scale: [P, K, Z] float32.
        key_base: [P, K, H] in the dtype of keys and queries.
    """

    key_scale: Any
    value_scale: Any
    key_base: Any

    def rows(self) -> BlockScales:
        """As kernels index them: scales like the rows of a pool, and a row for each base."""
        return BlockScales(
            self.key_scale.reshape(-1), self.value_scale.reshape(-1), flat_rows(self.key_base)
        )


def pool_refusals(blocks: Any) -> list[str]:
    """Why no Triton kernel takes a pool of this size.

    JAX addresses arrays of up to 2^32 bytes by signed 32-bit numbers of elements, which int8
    exceeds, and larger ones by 64-bit numbers.
    """
    if blocks.dtype.itemsize == 1 and 2**31 <= blocks.size <= 2**32:
        return [f"the int8 pool has {blocks.size} codes, between 2^31 and 2^32"]
    return []


def quantise(x: Float[Array, "*r H"]) -> tuple[Int8[Array, "*r H"], Float[Array, "*r"]]:
    """Codes of float32 rows, and the scale of each row; a row of zeros has the scale zero.

    Plain jax.numpy that kernels can use as well.
    """
    scale = jnp.max(jnp.abs(x), axis=-1) * (1 / LARGEST_CODE)
    some = scale >= float(jnp.finfo(jnp.float32).tiny)  # one over less than that is infinite
    scale = jnp.where(some, scale, 0.0)
    inverse = jnp.where(some, 1.0 / jnp.where(some, scale, 1.0), 0.0)
    steps = x * jnp.expand_dims(inverse, -1)
    codes = jnp.clip(jnp.floor(steps + 0.5), -LARGEST_CODE, LARGEST_CODE)
    return codes.astype(jnp.int8), scale


def scales_refusals(unquantised: Any, key_blocks: Any, value_blocks: Any, scales: Any) -> list[str]:
    """Why pools and scales do not fit each other, or not the dtype of what is not quantised."""
    pools = {"keys": key_blocks.dtype, "values": value_blocks.dtype}
    coded = scales is not None
    if coded and not isinstance(scales, BlockScales):
        return [f"scales are a {type(scales).__name__}; accepted is BlockScales"]
    reasons = [
        f"{name} are {dtype} {'beside scales' if coded else 'without scales'}; accepted are int8 "
        "with scales, or a float dtype without"
        for name, dtype in pools.items()
        if not (dtype == jnp.int8 if coded else jnp.issubdtype(dtype, jnp.floating))
    ]
    if not coded and len(set(pools.values())) > 1:
        reasons.append(f"keys are {pools['keys']} and values {pools['values']}; accepted is one")
    if coded:
        *rows, width = key_blocks.shape
        accepted = {
            "key_scale": (tuple(rows), "float32"),
            "value_scale": (tuple(rows), "float32"),
            "key_base": ((*rows[:2], width), str(unquantised.dtype)),
        }
        for name, array in scales._asdict().items():
            found = (tuple(array.shape), str(array.dtype))
            if found != accepted[name]:
                reasons.append(f"{name} is {found}; accepted is {accepted[name]}")
    return reasons
