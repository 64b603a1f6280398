"""Full or sliding attention with grouped queries; q/k norms and output gate as the family has."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from pallas_kernels.block_attention import block_attention
from pallas_kernels.flash_attention import flash_attention

from ..cache import KVBlocks, append
from ..config import QwenConfig
from .chunk import Chunk
from .layers import Linear, RMSNorm
from .rope import rotate


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
        bias = config.qkv_bias
        self.q_proj = Linear(width, query_dim * (2 if self.gated else 1), dtype, bias=bias)
        self.k_proj = Linear(width, kv_dim, dtype, bias=bias)
        self.v_proj = Linear(width, kv_dim, dtype, bias=bias)
        self.o_proj = Linear(query_dim, width, dtype, bias=config.attention_bias)
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
        )

    def __call__(
        self, x: Float[Array, "B T D"], cache: KVBlocks | None, chunk: Chunk
    ) -> tuple[Float[Array, "B T D"], KVBlocks | None]:
        batch, length, _ = x.shape
        q, gate = self._queries(x)
        k = self.k_proj(x).reshape(batch, length, self.kv_heads, self.head_dim)
        v = self.v_proj(x).reshape(batch, length, self.kv_heads, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, chunk.rotary), rotate(k, chunk.rotary)

        if cache is None or chunk.block_table is None:
            mixed = flash_attention(q, k, v, window=self.window, implementation=self.implementation)
        else:
            cache = append(cache, chunk.block_table, chunk.positions, k, v)
            mixed = block_attention(
                q,
                cache.key,
                cache.value,
                chunk.block_table,
                chunk.positions,
                window=self.window,
                implementation=self.implementation,
            )
        mixed = mixed.reshape(batch, length, self.heads * self.head_dim)
        if gate is not None:
            mixed = mixed * jax.nn.sigmoid(gate)
        return self.o_proj(mixed), cache

    def _queries(
        self, x: Float[Array, "B T D"]
    ) -> tuple[Float[Array, "B T N H"], Float[Array, "B T NH"] | None]:
        """Queries, and the output gate if q_proj holds one: [query | gate] rows, head by head."""
        batch, length, _ = x.shape
        projected = self.q_proj(x)
        if not self.gated:
            return projected.reshape(batch, length, self.heads, self.head_dim), None
        projected = projected.reshape(batch, length, self.heads, 2 * self.head_dim)
        q, gate = jnp.split(projected, 2, axis=-1)
        return q, gate.reshape(batch, length, self.heads * self.head_dim)
