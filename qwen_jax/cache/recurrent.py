"""State of the linear-attention layers: one row a sequence, of fixed size whatever its length."""

import jax.numpy as jnp
from jaxtyping import Array

from ..config import QwenConfig
from ..pytree import pytree


@pytree
class RecurrentState:
    """State of one linear-attention layer.

    A row whose sequence has length 0 counts as empty whatever it holds, so releasing a row clears
    nothing.

    Attributes:
        conv: [B, C, W] in the model's dtype, a ring: column p % W holds the convolution's input at
            position p. A ring of W columns, though only W - 1 are read, lets a kernel write the new
            column while others still read theirs.
        delta: [B, value heads, key width, value width], float32 unless the config has another
            `mamba_ssm_dtype`.
    """

    conv: Array
    delta: Array


def empty_recurrent(config: QwenConfig, batch: int) -> RecurrentState:
    """A zero state for `batch` sequences."""
    heads = config.linear_num_value_heads
    delta = (batch, heads, config.linear_key_head_dim, config.linear_value_head_dim)
    conv = (batch, config.conv_dim, config.linear_conv_kernel_dim)
    return RecurrentState(
        jnp.zeros(conv, jnp.dtype(config.dtype)),
        jnp.zeros(delta, jnp.dtype(config.mamba_ssm_dtype)),
    )


def copy_rows(state: RecurrentState, source: Array) -> RecurrentState:
    """Row b becomes a copy of row source[b]."""
    return RecurrentState(state.conv[source], state.delta[source])
