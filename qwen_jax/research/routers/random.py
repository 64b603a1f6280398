"""Random experts: the baseline that says what choosing is worth."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, UInt

from ...model import RouterContext
from .hashed import HashRouter, mixed


class RandomRouter(HashRouter):
    """K experts drawn for each token and position; weights 1 / k.

    The draw is a hash of seed, layer, position and token: the same in any batch and chunk.
    """

    def key(self, context: RouterContext) -> UInt[Array, "B T"]:
        """What a token's experts depend on."""
        return mixed(super().key(context) ^ mixed(context.positions.astype(jnp.uint32), 17))
