"""Full or sliding attention with grouped queries; q/k norms and output gate as the family has."""

from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Float

from pallas_kernels.attention_inputs import attention_inputs
from pallas_kernels.block_attention import block_attention
from pallas_kernels.flash_attention import flash_attention

from ..cache import KVBlocks
from ..config import QwenConfig
from .chunk import Chunk
from .layers import Linear, RMSNorm, project_together


class Attention(nnx.Module):
    """Project, normalise, rotate, attend, gate, project."""

    def __init__(self, config: QwenConfig, layer: int):
        self.heads = config.num_attention_heads
        self.kv_heads = config.num_key_value_heads
        self.head_dim = config.head_dim
        self.gated = config.attn_gate
        self.implementation = config.implementation
        sliding = config.layer_types[layer] == "sliding_attention"
        self.window = config.sliding_window if sliding else None

        width, dtype = config.hidden_size, config.dtype
        query_dim, kv_dim = self.heads * self.head_dim, self.kv_heads * self.head_dim
        run = config.implementation
        into: dict[str, Any] = {"bias": config.qkv_bias, "implementation": run}
        self.q_proj = Linear(width, query_dim * (2 if self.gated else 1), dtype, **into)
        self.k_proj = Linear(width, kv_dim, dtype, **into)
        self.v_proj = Linear(width, kv_dim, dtype, **into)
        self.o_proj = Linear(
            query_dim, width, dtype, bias=config.attention_bias, implementation=run
        )
        self.q_norm = self._head_norm(config)
        self.k_norm = self._head_norm(config)

    @staticmethod
    def _head_norm(config: QwenConfig) -> RMSNorm | None:
        if not config.qk_norm:
            return None
        return RMSNorm(
            config.head_dim,
            config.dtype,
            eps=config.rms_norm_eps,
            zero_centred=config.zero_centred_norm,
            implementation=config.implementation,
        )

    def __call__(
        self, x: Float[Array, "B T D"], cache: KVBlocks | None, chunk: Chunk
    ) -> tuple[Float[Array, "B T D"], KVBlocks | None]:
        batch, length, _ = x.shape
        q, k, v = project_together(x, (self.q_proj, self.k_proj, self.v_proj))
        q = q.reshape(batch, length, self.heads, -1)
        k, v = (y.reshape(batch, length, self.kv_heads, self.head_dim) for y in (k, v))
        mixed, cache = self._mix(q, k, v, cache, chunk)
        if self.gated:
            mixed = mixed * jax.nn.sigmoid(q[..., self.head_dim :])
        return self.o_proj(mixed.reshape(batch, length, self.heads * self.head_dim)), cache

    def _mix(
        self,
        q: Float[Array, "B T N G"],
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K H"],
        cache: KVBlocks | None,
        chunk: Chunk,
    ) -> tuple[Float[Array, "B T N H"], KVBlocks | None]:
        """What attention reads, and attention; G is H, or 2 H where heads hold their gate too."""
        projected = (q, k, v, chunk.rotary.cos, chunk.rotary.sin, *self._norm_weights())
        settings = self._settings()
        if cache is None or chunk.block_table is None:
            new = attention_inputs(*projected, **settings)
            mixed = flash_attention(
                new.q,
                new.key,
                new.value,
                window=self.window,
                implementation=self.implementation,
            )
            return mixed, cache
        table, positions = chunk.block_table, chunk.positions
        pools = (cache.key, cache.value, table, positions, cache.scales)
        new = attention_inputs(*projected, *pools, **settings)
        mixed = block_attention(
            new.q,
            new.key,
            new.value,
            table,
            positions,
            new.scales,
            window=self.window,
            implementation=self.implementation,
        )
        return mixed, KVBlocks(new.key, new.value, new.scales)

    def _norm_weights(self) -> tuple[Array | None, Array | None]:
        if self.q_norm is None or self.k_norm is None:
            return None, None
        return self.q_norm.weight[...], self.k_norm.weight[...]

    def _settings(self) -> dict[str, Any]:
        settings: dict[str, Any] = {"implementation": self.implementation}
        if self.q_norm is not None:
            settings |= {"eps": self.q_norm.eps, "zero_centred": self.q_norm.zero_centred}
        return settings
