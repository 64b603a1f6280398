"""Typed reads from a JSON object that collect every problem, so that one error names them all."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeGuard

from ..errors import ConfigError

_LONGEST_VALUE = 80


@dataclass
class Findings:
    """What reading a configuration found: problems refuse it, notes are for the user to know."""

    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def refuse(self, name: str, value: object, accepted: str) -> None:
        """Record that field `name` holds `value`, with a description of what it may hold."""
        self.problems.append(f"{name} is {show(value)}; accepted: {accepted}")

    def raise_problems(self, source: str, advice: str) -> None:
        """Raise one ConfigError that lists every problem; nothing if there is none."""
        if self.problems:
            lines = "".join(f"\n  - {problem}" for problem in self.problems)
            raise ConfigError(f"{source} cannot be used:{lines}\n{advice}")


def show(value: object) -> str:
    """Return a value as an error message shows it, shortened."""
    text = "null or missing" if value is None else repr(value)
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 3] + "..."


def is_integer(value: object, minimum: int) -> TypeGuard[int]:
    """Return whether `value` is an int (no bool, no float) of at least `minimum`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= minimum


def is_number(value: object) -> TypeGuard[int | float]:
    """Return whether `value` is an int or float that a finite float can hold, no bool."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return -sys.float_info.max <= value <= sys.float_info.max


def is_sequence(value: object) -> TypeGuard[Sequence[object]]:
    """Return whether `value` is what JSON calls an array."""
    return isinstance(value, list | tuple)


class FieldReader:
    """Reads fields of one JSON object; a bad one is recorded and replaced by its default.

    Args:
        values: The object.
        findings: Where problems are recorded.
        prefix: Written before field names in messages, as in `rope_parameters.`.
    """

    def __init__(self, values: Mapping[str, object], findings: Findings, prefix: str = "") -> None:
        self.values = values
        self.findings = findings
        self.prefix = prefix

    def refuse(self, name: str, accepted: str) -> None:
        """Record that the object's value of `name` is not accepted."""
        self.findings.refuse(self.prefix + name, self.values.get(name), accepted)

    def given(self, name: str) -> bool:
        """Return whether `name` is present and not null."""
        return self.values.get(name) is not None

    def integer(self, name: str, default: int, minimum: int = 1) -> int:
        """Return an integer of at least `minimum`."""
        value = self.values.get(name, default)
        if is_integer(value, minimum):
            return value
        self.refuse(name, f"an integer of at least {minimum}")
        return default

    def optional_integer(self, name: str, minimum: int = 1) -> int | None:
        """Return an integer of at least `minimum`, or None where absent or null."""
        return self.integer(name, minimum, minimum) if self.given(name) else None

    def number(self, name: str, default: float) -> float:
        """Return a finite number as a float."""
        value = self.values.get(name, default)
        if is_number(value):
            return float(value)
        self.refuse(name, "a finite number")
        return default

    def optional_number(self, name: str) -> float | None:
        """Return a finite number as a float, or None where absent or null."""
        return self.number(name, 0.0) if self.given(name) else None

    def flag(self, name: str, default: bool) -> bool:
        """Return a bool."""
        value = self.values.get(name, default)
        if isinstance(value, bool):
            return value
        self.refuse(name, "true or false")
        return default

    def integers(self, name: str, minimum: int = 0) -> tuple[int, ...]:
        """Return a list of integers of at least `minimum` as a tuple; () where absent or null."""
        value = self.values.get(name)
        if value is None:
            return ()
        if is_sequence(value) and all(is_integer(item, minimum) for item in value):
            return tuple(item for item in value if is_integer(item, minimum))
        self.refuse(name, f"a list of integers of at least {minimum}")
        return ()

    def widths(self, name: str, default: int, minimum: int = 1) -> int | tuple[int, ...]:
        """Return one width, or a tuple of one width a layer."""
        if not is_sequence(self.values.get(name)):
            return self.integer(name, default, minimum)
        return self.integers(name, minimum)
