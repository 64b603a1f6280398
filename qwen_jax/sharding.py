"""Logical axes of arrays to axes of a mesh of devices: the one place that knows which goes where.

Rows of a batch lie over `data`, experts over `expert`; all else is on every device. XLA divides the
work and adds what communication that needs.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from .errors import RequestError

DATA, EXPERT = "data", "expert"
# Logical axis -> mesh axis; axes that are not here are whole on every device.
RULES = {"rows": DATA, "experts": EXPERT}


def device_mesh(data: int, expert: int = 1) -> Mesh:
    """A mesh of the first data x expert devices.

    Args:
        data: over how many devices the rows of a batch lie.
        expert: over how many the experts of a layer lie.

    Raises:
        RequestError: fewer devices than that, or a number below 1.
    """
    have = jax.device_count()
    if min(data, expert) < 1 or data * expert > have:
        raise RequestError(
            f"a mesh of {data} x {expert} devices was asked for; accepted are numbers from 1 on "
            f"whose product is at most {have}, the devices that there are"
        )
    devices = jax.devices()[: data * expert]
    auto = (AxisType.Auto, AxisType.Auto)
    return jax.make_mesh((data, expert), (DATA, EXPERT), auto, devices=devices)


def parameter_axes(name: str, rank: int) -> tuple[str | None, ...]:
    """Logical axes of a parameter, and of what belongs to it, by its tree path."""
    stacked = ".mlp.experts." in name and rank == 3
    return ("experts", None, None) if stacked else (None,) * rank


def batch_axes(rank: int, *, leading: int = 0) -> tuple[str | None, ...]:
    """Logical axes of an array of a batch, whose rows are behind so many leading axes."""
    return tuple("rows" if axis == leading else None for axis in range(rank))


def sharding(
    mesh: Mesh, axes: tuple[str | None, ...], shape: tuple[int, ...], name: str
) -> NamedSharding:
    """Where an array of these logical axes lies.

    Raises:
        RequestError: an axis that its devices do not divide; names `name`.
    """
    placed = [None if axis is None else RULES[axis] for axis in axes]
    for axis, mesh_axis, size in zip(axes, placed, shape, strict=True):
        if mesh_axis is not None and size % mesh.shape[mesh_axis]:
            raise RequestError(
                f"{name} {list(shape)} has {size} {axis}, which {mesh.shape[mesh_axis]} devices of "
                f"the mesh's axis {mesh_axis!r} cannot share evenly; give a mesh that divides them"
            )
    return NamedSharding(mesh, PartitionSpec(*placed))


def of_parameters(mesh: Mesh, tree: Any) -> Any:
    """Shardings of a tree; arrays under a key of a dict belong to the parameter of that name."""

    def one(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        names = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
        name = str(names[-1]) if names else ""
        return sharding(mesh, parameter_axes(name, leaf.ndim), leaf.shape, name)

    return jax.tree_util.tree_map_with_path(one, tree)


def of_batch(mesh: Mesh, tree: Any, *, leading: int = 0) -> Any:
    """Shardings of the arrays of a batch."""

    def one(leaf: Any) -> NamedSharding:
        axes = batch_axes(leaf.ndim, leading=leading)
        return sharding(mesh, axes, leaf.shape, "the batch")

    return jax.tree.map(one, tree)
