"""Which implementation of an operation runs.

An operation has an ordered table of implementations, kernels first and the reference last. A call
that names none gets the first one that accepts it; a call that names one gets that one or an error,
never another.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._compat import Target, current_target
from .signature import contradictions

REFERENCE = "reference"


class Refused(ValueError):
    """An implementation does not take a call; the text says why."""


class ReferenceWarning(UserWarning):
    """A call on a GPU runs as plain jax.numpy, since no kernel takes it."""


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One way to compute an operation.

    Attributes:
        run: takes the call's arrays and settings, computes the result.
        refusals: takes the `Target`, then the call's arrays and settings. Returns the reasons why
            `run` does not take the call, empty if it does. Reads shapes and dtypes only.
    """

    run: Callable[..., Any]
    refusals: Callable[..., list[str]]


@dataclasses.dataclass(frozen=True)
class Choice:
    """What would run, and what would not.

    Attributes:
        chosen: name of the implementation that takes the call; None if none does.
        refused: the reasons of those that were asked before it and do not.
    """

    chosen: str | None
    refused: Mapping[str, list[str]]


@dataclasses.dataclass(frozen=True)
class Call:
    """A call that was traced.

    Attributes:
        operation: its name.
        arrays: by name, dtype and shape of each array, such as "bfloat16[1, 1, 16, 256]".
        settings: the keywords.
        named: whether the caller named an implementation.
        choice: what runs it.
    """

    operation: str
    arrays: Mapping[str, str]
    settings: Mapping[str, Any]
    named: bool
    choice: Choice


_record: contextvars.ContextVar[list[Call] | None] = contextvars.ContextVar("record", default=None)


@contextlib.contextmanager
def recording() -> Iterator[list[Call]]:
    """Every call that is traced inside, in order, goes into the list; refused ones too."""
    calls: list[Call] = []
    token = _record.set(calls)
    try:
        yield calls
    finally:
        _record.reset(token)


class Operation:
    """The implementations of one operation.

    Arrays are passed by position and settings by keyword.
    """

    def __init__(self, name: str, implementations: Mapping[str, Implementation]):
        self.name = name
        self.implementations = implementations
        self._functions: dict[Any, Callable[..., Any]] = {}
        self._warned = False

    def choose(
        self,
        *arrays: Any,
        implementation: str | None,
        target: Target | None = None,
        **settings: Any,
    ) -> Choice:
        """Which implementation takes a call, computing nothing.

        Shapes and dtypes that contradict the definition's annotations, and settings that are no
        plain values, are refused by all.

        Args:
            arrays: the call's arrays, or `jax.ShapeDtypeStruct` in their place.
            implementation: the only one to ask, or None for the whole table.
            target: the device; the current one if None.
            settings: the call's settings.
        """
        if implementation is not None and implementation not in self.implementations:
            known = ", ".join(self.implementations)
            return Choice(None, {implementation: [f"{self.name} has {known} only"]})
        target = current_target() if target is None else target
        names = list(self.implementations) if implementation is None else [implementation]
        refused = {}
        wrong = contradictions(self.implementations[REFERENCE].run, arrays) or _unusable(settings)
        if wrong:
            return Choice(None, dict.fromkeys(names, wrong))
        for name in names:
            reasons = self.implementations[name].refusals(target, *arrays, **settings)
            if not reasons:
                return Choice(name, refused)
            refused[name] = reasons
        return Choice(None, refused)

    def __call__(self, *arrays: Any, implementation: str | None, **settings: Any) -> Any:
        """Compute the operation. What is not yet a JAX array, NumPy's say, is made one.

        Raises:
            ExceptionGroup: nothing takes the call; one `Refused` an implementation that was asked.
        """
        arrays = tuple(map(_as_array, arrays))
        choice = self.choose(*arrays, implementation=implementation, **settings)
        if (record := _record.get()) is not None:
            named = implementation is not None
            record.append(Call(self.name, self._named(arrays), settings, named, choice))
        if choice.chosen is None:
            raise self._error(choice, arrays, settings)
        if choice.chosen == REFERENCE and choice.refused:
            self._warn(choice)
        if choice.chosen == REFERENCE:
            return self.implementations[REFERENCE].run(*arrays, **settings)
        return self._compiled(choice.chosen, tuple(settings.items()), current_target())(*arrays)

    def within(self, *arrays: Any, **settings: Any) -> Any:
        """Compute it as a part of another operation's kernel, whose call alone is recorded.

        Raises:
            ExceptionGroup: see `__call__`.
        """
        choice = self.choose(*arrays, implementation=None, **settings)
        if choice.chosen is None:
            raise self._error(choice, arrays, settings)
        return self.implementations[choice.chosen].run(*arrays, **settings)

    def _compiled(
        self, name: str, settings: tuple[tuple[str, Any], ...], target: Target
    ) -> Callable[..., Any]:
        """One function for all calls alike: a new one would be traced and compiled again."""
        key = name, settings, target
        if key not in self._functions:
            run, reference = (
                functools.partial(self.implementations[each].run, **dict(settings))
                for each in (name, REFERENCE)
            )
            self._functions[key] = jax.jit(_with_gradient_of(reference, run))
        return self._functions[key]

    def _named(self, arrays: tuple[Any, ...]) -> dict[str, str]:
        names = inspect.signature(self.implementations[REFERENCE].run).parameters
        return {name: _described(array) for name, array in zip(names, arrays, strict=False)}

    def _error(
        self, choice: Choice, arrays: tuple[Any, ...], settings: Mapping[str, Any]
    ) -> ExceptionGroup:
        call = [f"{name}: {text}" for name, text in self._named(arrays).items()]
        call += [f"{name}={value}" for name, value in settings.items()]
        refused = choice.refused
        if REFERENCE in refused:
            # It is asked last and takes all that has a meaning: what others said besides is beside
            # the point.
            refused = {REFERENCE: refused[REFERENCE]}
        reasons = [f"{name}: {'; '.join(why)}" for name, why in refused.items()]
        return ExceptionGroup(
            f"no implementation of {self.name} that was asked takes ({', '.join(call)}): "
            f"{'; '.join(reasons)}",
            [Refused(reason) for reason in reasons],
        )

    def _warn(self, choice: Choice) -> None:
        if self._warned or current_target().platform != "gpu" or _record.get() is not None:
            return
        self._warned = True
        reasons = "; ".join(f"{name}: {', '.join(why)}" for name, why in choice.refused.items())
        warnings.warn(
            f"{self.name} runs as plain jax.numpy here, which is slow ({reasons}). "
            "This is said once.",
            ReferenceWarning,
            stacklevel=4,
        )


def _with_gradient_of(reference: Callable[..., Any], run: Callable[..., Any]) -> Callable[..., Any]:
    """`run` with the derivative of `reference`: kernels only go forward."""
    differentiable = jax.custom_vjp(run)

    def forward(*arrays: Any) -> tuple[Any, tuple[Any, ...]]:
        return run(*arrays), arrays

    def backward(arrays: tuple[Any, ...], cotangents: Any) -> tuple[Any, ...]:
        return jax.vjp(reference, *arrays)[1](cotangents)

    differentiable.defvjp(forward, backward)
    return differentiable


def _as_array(value: Any) -> Any:
    """A JAX array, or a dataclass of them, or a tuple of either; None stays."""
    if value is None:
        return None
    if isinstance(value, tuple) or dataclasses.is_dataclass(value):
        return jax.tree.map(jnp.asarray, value)
    return jnp.asarray(value)


def _unusable(settings: Mapping[str, Any]) -> list[str]:
    """Settings that no kernel can be made for."""
    return [
        f"{name} is {_described(value)}; accepted is a plain Python value"
        for name, value in settings.items()
        if isinstance(value, jax.Array | np.ndarray)
    ]


def _described(array: Any) -> str:
    if hasattr(array, "shape") and hasattr(array, "dtype"):
        return f"{array.dtype}{list(array.shape)}"
    if isinstance(array, tuple):
        return f"({', '.join(map(_described, array))})"
    if dataclasses.is_dataclass(array):
        return f"{type(array).__name__}({', '.join(map(_described, jax.tree.leaves(array)))})"
    return repr(array)
