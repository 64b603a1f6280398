"""The shared expert as products of all tokens, like those of any layer."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..dequant_matmul.api import OPERATION
from ..dequant_matmul.qtensor import QTensor
from .shared import SharedExpert


def shared_products(
    x: Float[Array, "M D"], shared: SharedExpert, dtype: Any
) -> Float[Array, "M D"]:
    """What it adds to each token, in float32; nothing of it waits for the router.

    Args:
        x: tokens.
        shared: the expert.
        dtype: of what is multiplied.
    """
    gate, up = _products(x.astype(dtype), shared.gate_proj, shared.up_proj)
    made = (jax.nn.silu(gate) * up).astype(dtype)
    [y] = _products(made, shared.down_proj)
    # One column is no work for tensor cores.
    own = jnp.sum(x.astype(jnp.float32) * shared.gate.astype(jnp.float32), axis=-1, keepdims=True)
    return y * jax.nn.sigmoid(shared.logits(own))


def _products(
    x: Float[Array, "M I"], *weights: Float[Array, "_O I"] | QTensor
) -> tuple[Float[Array, "M _O"], ...]:
    """Rows times matrices that are stored alike, in float32."""
    if isinstance(weights[0], QTensor):
        return OPERATION.within(x, weights, dtype=jnp.dtype("float32"))
    plain = [weight.astype(x.dtype) for weight in weights if not isinstance(weight, QTensor)]
    product = functools.partial(jnp.einsum, "mi,oi->mo", x, preferred_element_type=jnp.float32)
    return tuple(map(product, plain))
