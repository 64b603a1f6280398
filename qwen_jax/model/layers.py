"""The small layers: linear, embedding, the three norms, and the dense gated MLP.

A fresh module holds shapes only (`jax.ShapeDtypeStruct`), so a model of any size is built without
memory. `initialise` fills it with random weights, `qwen_jax.load` with trained ones.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int


def parameter(shape: tuple[int, ...], dtype: str) -> nnx.Param:
    """A parameter that knows its shape and dtype but holds no array yet."""
    return nnx.Param(jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)))


class Linear(nnx.Module):
    """y = x W^T + b in the weight's dtype; the weight is [out, in] as in the checkpoints."""

    def __init__(self, inputs: int, outputs: int, dtype: str, *, bias: bool = False):
        self.weight = parameter((outputs, inputs), dtype)
        self.bias = parameter((outputs,), dtype) if bias else None

    def __call__(self, x: Float[Array, "... i"]) -> Float[Array, "... o"]:
        weight = self.weight[...]
        y = jnp.einsum("...i,oi->...o", x.astype(weight.dtype), weight)
        if self.bias is None:
            return y
        return y + jnp.broadcast_to(self.bias[...], y.shape)


class Embedding(nnx.Module):
    """One row of the table a token, in float32 as the residual stream wants it.

    An id outside the table gives NaN, never another token's row.
    """

    def __init__(self, rows: int, width: int, dtype: str):
        self.weight = parameter((rows, width), dtype)

    def __call__(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        rows = self.weight[...].at[tokens]
        chosen = rows.get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
        return chosen.astype(jnp.float32)


class RMSNorm(nnx.Module):
    """Root-mean-square norm over the last axis, in float32, rounded once to x's dtype.

    Two kinds: zero-centred, times 1 + w (qwen3_next, qwen3_5*); and plain, times w (the others).
    """

    def __init__(self, width: int, dtype: str, *, eps: float, zero_centred: bool):
        self.weight = parameter((width,), dtype)
        self.eps = eps
        self.zero_centred = zero_centred

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        weight = self.weight[...].astype(jnp.float32)
        scale = 1.0 + weight if self.zero_centred else weight
        return (normalise(x, self.eps) * jnp.broadcast_to(scale, x.shape)).astype(x.dtype)


class GatedRMSNorm(nnx.Module):
    """Norm, then weight, then SiLU of a gate: the norm after the delta rule.

    Its weight stays float32.
    """

    def __init__(self, width: int, *, eps: float):
        self.weight = parameter((width,), "float32")
        self.eps = eps

    def __call__(
        self, x: Float[Array, "... R"], gate: Float[Array, "... R"]
    ) -> Float[Array, "... R"]:
        normal = normalise(x, self.eps).astype(x.dtype).astype(jnp.float32)
        weighted = normal * jnp.broadcast_to(self.weight[...], x.shape)
        return (weighted * jax.nn.silu(gate.astype(jnp.float32))).astype(x.dtype)


def normalise(x: Float[Array, "... D"], eps: float) -> Float[Array, "... D"]:
    """X / sqrt(mean(x^2) + eps) over the last axis, float32."""
    wide = x.astype(jnp.float32)
    return wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)


class MLP(nnx.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, width: int, hidden: int, dtype: str):
        self.gate_proj = Linear(width, hidden, dtype)
        self.up_proj = Linear(width, hidden, dtype)
        self.down_proj = Linear(hidden, width, dtype)

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))
