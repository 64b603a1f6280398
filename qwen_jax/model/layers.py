"""The small layers: linear, embedding, the three norms, and the dense gated MLP.

A fresh module holds shapes only (`jax.ShapeDtypeStruct`), so a model of any size is built without
memory. `initialise` fills it with random weights, `qwen_jax.load` with trained ones. A matrix may
be a `QTensor` in place of an array: layers go by what they find.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Real

from pallas_kernels.dequant_matmul import dequant_matmul
from pallas_kernels.rms_norm import add_rms_norm, gated_rms_norm, rms_norm

from ..quant import QTensor


def parameter(shape: tuple[int, ...], dtype: str) -> nnx.Param:
    """A parameter that knows its shape and dtype but holds no array yet."""
    return nnx.Param(jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)))


def project(
    x: Float[Array, "... i"],
    weight: Float[Array, "o i"] | QTensor,
    *,
    dtype: DTypeLike,
    result: DTypeLike | None = None,
    implementation: str | None,
) -> Float[Array, "... o"]:
    """The product x W^T, summed in float32 and rounded once.

    Asked for bfloat16, XLA rounds each product of a matrix and one vector.

    Args:
        x: rows.
        weight: matrix.
        dtype: of x on its way into a product with codes; an array has it as its own dtype.
        result: dtype of the result; that of the rows in the product if None.
        implementation: of the product with codes.
    """
    if isinstance(weight, QTensor):
        if weight.input_scale is not None:
            scale = weight.input_scale.astype(jnp.float32)
            x = x.astype(jnp.float32) * jnp.broadcast_to(scale, x.shape)
            weight = dataclasses.replace(weight, input_scale=None)
        x = x.astype(dtype)
        return dequant_matmul(x, (weight,), dtype=result, implementation=implementation)[0]
    x = x.astype(weight.dtype)
    y = jnp.einsum("...i,oi->...o", x, weight, preferred_element_type=jnp.float32)
    return y.astype(result or weight.dtype)


class Linear(nnx.Module):
    """y = x W^T + b in the model's dtype; the weight is [out, in] as in the checkpoints."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        dtype: str,
        *,
        bias: bool = False,
        implementation: str | None = None,
    ):
        self.weight = parameter((outputs, inputs), dtype)
        self.bias = parameter((outputs,), dtype) if bias else None
        self.dtype = dtype
        self.implementation = implementation

    def __call__(self, x: Float[Array, "... i"]) -> Float[Array, "... o"]:
        return self.shifted(
            project(x, self.weight[...], dtype=self.dtype, implementation=self.implementation)
        )

    def shifted(self, y: Float[Array, "... o"]) -> Float[Array, "... o"]:
        """Y + b."""
        return y if self.bias is None else y + jnp.broadcast_to(self.bias[...], y.shape)


def project_together(
    x: Float[Array, "... i"], linears: Sequence[Callable[[Array], Array]]
) -> tuple[Float[Array, "... _o"], ...]:
    """What linears of one dtype and implementation make of the same rows.

    If some have codes, the products are one call. Left out of it, and called like any module, are
    linears with an `input_scale`, whose rows are not the same, and whatever stands in a linear's
    place to look at its rows or to change them.
    """
    together = [linear for linear in linears if _shares_rows(linear)]
    weights = tuple(linear.weight[...] for linear in together)
    if not any(isinstance(weight, QTensor) for weight in weights):
        return tuple(linear(x) for linear in linears)
    rows, implementation = x.astype(together[0].dtype), together[0].implementation
    products = iter(dequant_matmul(rows, weights, implementation=implementation))
    return tuple(
        linear.shifted(next(products)) if _shares_rows(linear) else linear(x) for linear in linears
    )


def _shares_rows(linear: Any) -> TypeGuard[Linear]:
    if type(linear) is not Linear:
        return False
    weight = linear.weight[...]
    return not isinstance(weight, QTensor) or weight.input_scale is None


class Embedding(nnx.Module):
    """One row of the table a token, in float32 as the residual stream wants it.

    An id outside the table gives NaN, never another token's row. Of a table in codes, the rows of
    the tokens alone become numbers.
    """

    def __init__(self, rows: int, width: int, dtype: str):
        self.weight = parameter((rows, width), dtype)

    def __call__(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        table = self.weight[...]
        if not isinstance(table, QTensor):
            return _rows(table, tokens).astype(jnp.float32)
        parts = dataclasses.replace(table, input_scale=None)
        chosen = jax.tree.map(lambda leaf: _rows(leaf, tokens), parts)
        rows = chosen.dequantise(jnp.float32)
        if table.input_scale is None:
            return rows
        return rows * jnp.broadcast_to(table.input_scale.astype(jnp.float32), rows.shape)


def _rows(table: Real[Array, "V *d"], tokens: Int[Array, "B T"]) -> Real[Array, "B T *d"]:
    """Rows of an array; NaN, or 0 for integers, where there is none."""
    fill = jnp.nan if jnp.issubdtype(table.dtype, jnp.floating) else 0
    # Flat rows: XLA could move a transposition of the chosen ones to the whole table.
    flat = table.reshape(table.shape[0], -1)
    rows = flat.at[tokens].get(mode="fill", fill_value=fill, wrap_negative_indices=False)
    return rows.reshape(*tokens.shape, *table.shape[1:])


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

    def __call__(
        self, x: Float[Array, "... D"], result: DTypeLike | None = None
    ) -> Float[Array, "... D"]:
        """The norm, in the dtype `result` or else that of the module."""
        settings: dict[str, Any] = self._settings() | {"dtype": result or self.result}
        return rms_norm(x, self.weight[...], **settings)

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

    def __init__(self, width: int, hidden: int, dtype: str, *, implementation: str | None = None):
        self.gate_proj = Linear(width, hidden, dtype, implementation=implementation)
        self.up_proj = Linear(width, hidden, dtype, implementation=implementation)
        self.down_proj = Linear(hidden, width, dtype, implementation=implementation)

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        return self.beside(x)[0]

    def beside(
        self, x: Float[Array, "... D"], *linears: Callable[[Array], Array]
    ) -> tuple[Float[Array, "... _o"], ...]:
        """The result, and those of further linears that read the same rows."""
        inputs = self.gate_proj, self.up_proj, *linears
        gate, up, *others = project_together(x, inputs)
        return self.down_proj(jax.nn.silu(gate) * up), *others
