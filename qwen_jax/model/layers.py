"""The small layers: linear, embedding, the three norms, and the dense gated MLP.

A fresh module holds shapes only (`jax.ShapeDtypeStruct`), so a model of any size is built without
memory. `initialise` fills it with random weights, `qwen_jax.load` with trained ones.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from pallas_kernels.rms_norm import add_rms_norm, gated_rms_norm, rms_norm


def parameter(shape: tuple[int, ...], dtype: str) -> nnx.Param:
    """A parameter that knows its shape and dtype but holds no array yet."""
    return nnx.Param(jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)))


class Linear(nnx.Module):
    """y = x W^T + b in the weight's dtype; the weight is [out, in] as in the checkpoints.

    Summed in float32: asked for bfloat16, XLA rounds each product of a matrix and one vector.
    """

    def __init__(self, inputs: int, outputs: int, dtype: str, *, bias: bool = False):
        self.weight = parameter((outputs, inputs), dtype)
        self.bias = parameter((outputs,), dtype) if bias else None

    def __call__(self, x: Float[Array, "... i"]) -> Float[Array, "... o"]:
        weight = self.weight[...]
        x = x.astype(weight.dtype)
        y = jnp.einsum("...i,oi->...o", x, weight, preferred_element_type=jnp.float32)
        y = y.astype(weight.dtype)
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
    """Root-mean-square norm over the last axis, in float32, rounded once.

    Two kinds: zero-centred, times 1 + w (qwen3_next, qwen3_5*); and plain, times w (the others).
    The result has the dtype `result`, or that of x if none is named.
    """

    def __init__(
        self,
        width: int,
        dtype: str,
        *,
        eps: float,
        zero_centred: bool,
        implementation: str | None,
        result: str | None = None,
    ):
        self.weight = parameter((width,), dtype)
        self.eps = eps
        self.zero_centred = zero_centred
        self.implementation = implementation
        self.result = result

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        return rms_norm(x, self.weight[...], **self._settings())

    def after_adding(
        self, x: Float[Array, "... D"], y: Float[Array, "... D"]
    ) -> tuple[Float[Array, "... D"], Float[Array, "... D"]]:
        """X + y in x's dtype, and its norm."""
        normal, total = add_rms_norm(x, y, self.weight[...], **self._settings())
        return total, normal

    def _settings(self) -> dict[str, Any]:
        return {
            "eps": self.eps,
            "zero_centred": self.zero_centred,
            "dtype": self.result,
            "implementation": self.implementation,
        }


class GatedRMSNorm(nnx.Module):
    """Norm, then weight, then SiLU of a gate: the norm after the delta rule.

    Its weight stays float32.
    """

    def __init__(self, width: int, *, eps: float, implementation: str | None):
        self.weight = parameter((width,), "float32")
        self.eps = eps
        # XLA joins it with the projection that makes the gate: a kernel would be one launch more.
        self.implementation = implementation or "reference"

    def __call__(
        self, x: Float[Array, "... R"], gate: Float[Array, "... R"]
    ) -> Float[Array, "... R"]:
        weight = self.weight[...]
        return gated_rms_norm(x, gate, weight, eps=self.eps, implementation=self.implementation)


class MLP(nnx.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, width: int, hidden: int, dtype: str):
        self.gate_proj = Linear(width, hidden, dtype)
        self.up_proj = Linear(width, hidden, dtype)
        self.down_proj = Linear(hidden, width, dtype)

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))
