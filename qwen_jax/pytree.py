"""`@pytree`: a frozen dataclass whose fields are pytree leaves or subtrees."""

import dataclasses
from typing import TypeVar, dataclass_transform

import jax

T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def pytree(cls: type[T]) -> type[T]:
    """Make a class a frozen dataclass that JAX transformations understand.

    A field with `metadata={"static": True}` is part of the structure. JAX also builds such objects
    with leaves that are no arrays (shapes, shardings, placeholders), so a run-time type checker
    must leave their construction alone.
    """
    cls = dataclasses.dataclass(frozen=True)(cls)
    cls.__no_type_check__ = True  # pyright: ignore[reportAttributeAccessIssue]
    return jax.tree_util.register_dataclass(cls)
