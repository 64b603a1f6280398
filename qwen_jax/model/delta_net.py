"""Gated DeltaNet: linear attention with a short convolution and a recurrent state."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from pallas_kernels.delta_rule import gated_delta_rule

from ..cache import RecurrentState, empty_recurrent
from ..config import QwenConfig
from .chunk import Chunk
from .layers import GatedRMSNorm, Linear, parameter, project_together


class ShortConvolution(nnx.Module):
    """Taps of the depthwise convolution, [channels, 1, taps]; the last meets the current token."""

    def __init__(self, channels: int, taps: int, dtype: str):
        self.weight = parameter((channels, 1, taps), dtype)


class GatedDeltaNet(nnx.Module):
    """Project, run the gated delta rule over the new tokens, norm under a gate, project."""

    def __init__(self, config: QwenConfig):
        width, dtype, run = config.hidden_size, config.dtype, config.implementation
        heads = config.linear_num_value_heads
        self.config = config
        self.in_proj_qkv = Linear(width, config.conv_dim, dtype, implementation=run)
        self.in_proj_z = Linear(width, config.value_dim, dtype, implementation=run)
        self.in_proj_b = Linear(width, heads, dtype, implementation=run)
        self.in_proj_a = Linear(width, heads, dtype, implementation=run)
        self.conv1d = ShortConvolution(config.conv_dim, config.linear_conv_kernel_dim, dtype)
        self.A_log = parameter((heads,), "float32")
        self.dt_bias = parameter((heads,), "float32")
        self.norm = GatedRMSNorm(
            config.linear_value_head_dim,
            eps=config.rms_norm_eps,
            implementation=config.implementation,
        )
        self.out_proj = Linear(config.value_dim, width, dtype, implementation=run)

    def __call__(
        self, x: Float[Array, "B T D"], cache: RecurrentState | None, chunk: Chunk
    ) -> tuple[Float[Array, "B T D"], RecurrentState | None]:
        state = empty_recurrent(self.config, x.shape[0]) if cache is None else cache
        inputs = self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a
        qkv, gate, b, a = project_together(x, inputs)
        mixed, conv, delta = gated_delta_rule(
            qkv,
            b,
            a,
            self.conv1d.weight[...][:, 0],
            self.A_log[...],
            self.dt_bias[...],
            state.conv,
            state.delta,
            chunk.start,
            chunk.lengths,
            implementation=self.config.implementation,
        )
        normal = self.norm(mixed, gate.reshape(mixed.shape))
        y = self.out_proj(jnp.reshape(normal, (*x.shape[:2], -1)))
        return y, None if cache is None else RecurrentState(conv, delta)
