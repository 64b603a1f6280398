"""What a loop carries, its small arrays as one.

On a GPU each small array costs a step a launch of its own, and a copy where the old value is still
read when the new one is there. One array of all of them is written once, at the end.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int


class Carry(NamedTuple):
    """A tree taken apart by `pack`.

    Attributes:
        small: int32 [n], what is in the scalars and vectors of so many rows, of int32 and bool.
        large: the other leaves.
    """

    small: Int[Array, " n"]
    large: list[Array]


class Packing:
    """How trees of the same structure and shapes are packed and unpacked."""

    def __init__(self, tree: Any, rows: int):
        leaves, self._structure = jax.tree.flatten(tree)
        self._shapes = [leaf.shape for leaf in leaves]
        self._dtypes = [leaf.dtype for leaf in leaves]
        self._is_small = [
            leaf.dtype in (jnp.int32, jnp.bool_) and leaf.shape in ((), (rows,)) for leaf in leaves
        ]

    def pack(self, tree: Any) -> Carry:
        """The tree as a carry."""
        leaves = jax.tree.leaves(tree)
        small = [leaf.astype(jnp.int32).reshape(-1) for leaf in self._chosen(leaves, small=True)]
        return Carry(jnp.concatenate(small), self._chosen(leaves, small=False))

    def unpack(self, carry: Carry) -> Any:
        """The tree again."""
        large, leaves, start = iter(carry.large), [], 0
        for shape, dtype, small in zip(self._shapes, self._dtypes, self._is_small, strict=True):
            if not small:
                leaves.append(next(large))
                continue
            size = shape[0] if shape else 1
            part = carry.small[start : start + size].reshape(shape)
            leaves.append(part != 0 if dtype == jnp.bool_ else part)
            start += size
        return jax.tree.unflatten(self._structure, leaves)

    def _chosen(self, leaves: Sequence[Array], *, small: bool) -> list[Array]:
        return [leaf for leaf, own in zip(leaves, self._is_small, strict=True) if own == small]
