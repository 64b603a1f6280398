"""`QTensor`: matrices in codes, as one pytree."""

from __future__ import annotations

import dataclasses
import math

import jax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt

from .layout import dequantise


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

    def dequantise(self, dtype: DTypeLike) -> Float[Array, "*S O I"]:
        """The numbers that it stands for, computed in float32 and rounded once."""
        wide = dequantise(self.codes, self.scale, self.zero, self.inputs, self.group_size)
        if self.input_scale is not None:
            wide = wide * self.input_scale.astype(wide.dtype)[..., None, :]
        return wide.astype(dtype)
