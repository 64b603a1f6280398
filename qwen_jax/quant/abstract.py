"""Shapes of tensors in codes, and which tensors of a model can be in codes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.dequant_matmul.layout import group_count, unit_count
from pallas_kernels.dequant_matmul.qtensor import QTensor

from .scheme import Scheme, TensorScheme

Abstract = jax.ShapeDtypeStruct | QTensor

_READ_BY_VALUE = ("conv1d.weight", "mlp.gate.weight")


def abstract_qtensor(shape: tuple[int, ...], scheme: TensorScheme) -> QTensor:
    """A tensor in codes with shapes and dtypes in place of arrays, as files have it.

    Args:
        shape: [*, O, I].
        scheme: how it is stored.
    """
    *outputs, inputs = shape
    form = scheme.format

    def part(dtype: DTypeLike, *last: int, of: list[int] = outputs) -> Any:
        return jax.ShapeDtypeStruct((*of, *last), jnp.dtype(dtype))

    scale = part(jnp.bfloat16, group_count(inputs, form.group_size))
    return QTensor(
        part(jnp.uint32, form.bits, unit_count(inputs)),
        scale,
        None if form.symmetric else scale,
        part(jnp.float32, inputs, of=outputs[:-1]) if scheme.input_scale else None,
        inputs,
        form.group_size,
    )


def in_codes(tree: Mapping[str, jax.ShapeDtypeStruct], scheme: Scheme) -> dict[str, Abstract]:
    """A tree of shapes and dtypes with those tensors in codes that a scheme names."""
    return {
        path: abstract_qtensor(leaf.shape, scheme.tensors[path]) if path in scheme.tensors else leaf
        for path, leaf in tree.items()
    }


def nbytes(leaf: Abstract) -> int:
    """Bytes of a tensor, in codes or not."""
    if isinstance(leaf, QTensor):
        return leaf.nbytes
    return math.prod(leaf.shape) * leaf.dtype.itemsize


def why_not(path: str, shape: tuple[int, ...], group_size: int) -> str:
    """Why a tensor cannot be in codes of groups of a size; "" if it can."""
    if len(shape) < 2 or path.endswith(_READ_BY_VALUE):
        return f"{path} {list(shape)} is not in codes in any model"
    if group_size > shape[-1]:
        return f"{path} has {shape[-1]} inputs, fewer than a group of {group_size}"
    return ""


def cut_groups(leaf: QTensor) -> str:
    """Why the sharding of an abstract tensor cannot be, "" if it can: it cuts groups in two."""
    inputs, group_size = leaf.inputs, leaf.group_size
    if getattr(leaf.codes, "sharding", None) is None:
        return ""
    shards = _shards(leaf.codes)
    if shards == 1 == _shards(leaf.scale):
        return ""
    if inputs % (shards * group_size) == 0 and _shards(leaf.scale) == shards:
        return ""
    return (
        f"{inputs} inputs in groups of {group_size} are split over {shards} devices, which cuts "
        f"groups in two or parts them from their scales; accepted are inputs that are a multiple "
        f"of {shards * group_size}, with codes and scales split alike: split the outputs, or use "
        "smaller groups"
    )


def _shards(leaf: Any) -> int:
    """Parts of the last axis."""
    spec = leaf.sharding
    if spec is None or spec.is_fully_replicated:
        return 1
    # Of an axis that all parts of any sharding divide.
    size = math.lcm(*range(1, len(spec.device_set) + 1))
    probe = (*(size for _ in leaf.shape),)
    return size // spec.shard_shape(probe)[-1]
