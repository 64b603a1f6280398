"""`QTensor`: matrices in codes, as one pytree."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt

from .layout import BITS, GROUP_SIZES, dequantise, group_count, unit_count


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QTensor:
    """One matrix [O, I] or a stack of them [*, O, I], in codes of 3, 4 or 8 bits.

    It stands for W[o, i] = scale * (code - zero) * input_scale[i]; `layout` says where codes lie.
    The product x W^T multiplies x by `input_scale` first, and never makes W.

    Attributes:
        codes: uint32 words [*, O, Q, U] of `layout.pack`.
        scale: of each group, [*, O, J].
        zero: what code is 0, [*, O, J]; the middle (`layout.CENTRES`) if None.
        input_scale: a factor of each input, [*, I]; ones if None.
        inputs: I.
        group_size: inputs that share a scale: 32, 64 or 128.
    """

    codes: UInt[Array, "*S O Q U"]
    scale: Float[Array, "*S O J"]
    zero: Float[Array, "*S O J"] | None
    input_scale: Float[Array, "*S I"] | None
    inputs: int = dataclasses.field(metadata={"static": True})
    group_size: int = dataclasses.field(metadata={"static": True})

    # JAX also builds trees with leaves that are no arrays.
    __no_type_check__ = True

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return self.codes.shape[-2]

    @property
    def shape(self) -> tuple[int, ...]:
        """[*, O, I]."""
        return (*self.codes.shape[:-2], self.inputs)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        leaves = jax.tree.leaves(self)
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)

    def __getitem__(self, index: Any) -> QTensor:
        """Some matrices of a stack, or all of it for `...`."""
        return jax.tree.map(lambda leaf: leaf[index], self)

    def contradictions(self) -> list[str]:
        """Where shapes and dtypes of the arrays do not fit one another; empty if they do."""
        *outer, bits, _ = self.codes.shape
        if bits not in BITS or self.group_size not in GROUP_SIZES:
            return [
                f"codes have {bits} words for 32 values in groups of {self.group_size}; accepted "
                f"are {BITS} and {GROUP_SIZES}"
            ]
        groups = (*outer, group_count(self.inputs, self.group_size))
        expected = {
            "codes": (self.codes, (*outer, bits, unit_count(self.inputs)), jnp.uint32),
            "scale": (self.scale, groups, jnp.floating),
            "zero": (self.zero, groups, jnp.floating),
            "input_scale": (self.input_scale, (*outer[:-1], self.inputs), jnp.floating),
        }
        return [
            f"{name} is {leaf.dtype}{list(leaf.shape)}; {self.inputs} inputs in groups of "
            f"{self.group_size} need {dtype.__name__}{list(shape)}"
            for name, (leaf, shape, dtype) in expected.items()
            if leaf is not None and (leaf.shape != shape or not jnp.issubdtype(leaf.dtype, dtype))
        ]

    def dequantise(self, dtype: DTypeLike) -> Float[Array, "*S O I"]:
        """The numbers that it stands for, computed in float32 and rounded once."""
        wide = dequantise(self.codes, self.scale, self.zero, self.inputs, self.group_size)
        if self.input_scale is not None:
            wide = wide * self.input_scale.astype(wide.dtype)[..., None, :]
        return wide.astype(dtype)
