"""What config.json says about quantisation, field by field: each is understood or refused.

Which tensors are quantised, and how wide they are, is read off the tensors; the configuration is
needed for what they do not show, such as the zero convention of GPTQ, and is held against them.
Its lists of modules are not used: releases name the modules of the model, not of the file, and
the file decides.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from qwen_jax.checkpoint.json_file import read_object
from qwen_jax.checkpoint.problems import Problems, show
from qwen_jax.errors import CheckpointError

# `compression_config` is what compressed-tensors wrote until 2024.
_NAMES = ("quantization_config", "compression_config")
# Files of older packers, and the method that each stands for where it names none.
_LEGACY = (("quantize_config.json", "gptq"), ("quant_config.json", "awq"))


class Declaration(NamedTuple):
    """A quantisation configuration as it stands in a file.

    Attributes:
        method: its quant_method in small letters; empty if it has none.
        values: its fields.
        place: where it was found, such as `config.json: quantization_config`.
    """

    method: str
    values: Mapping[str, Any]
    place: str


def find_declaration(path: Path, packed: bool) -> Declaration | None:
    """Finds the quantisation configuration of a folder.

    Args:
        path: the folder.
        packed: whether it holds GPTQ or AWQ matrices; the files of older packers count only then.

    Returns:
        The one in config.json, at the top or in `text_config`, else that of an older packer.

    Raises:
        CheckpointError: a file that is not a JSON object, or two configurations that differ.
    """
    config = _object(path / "config.json")
    inner = config.get("text_config")
    levels = {"": config, "text_config.": inner if isinstance(inner, dict) else {}}
    found = {
        f"config.json: {level}{name}": values[name]
        for level, values in levels.items()
        for name in _NAMES
        if values.get(name)
    }
    if not found and packed:
        for file, method in _LEGACY:
            content = _object(path / file)
            if content:
                found[file] = {"quant_method": content.get("method", method), **content}
    if not found:
        return None
    place, values = next(iter(found.items()))
    for other, again in found.items():
        if again != values:
            raise CheckpointError(
                f"{path}: {place} and {other} differ; keep the one that the weights were made with"
            )
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: {place} is {show(values)}; expected an object")
    return Declaration(str(values.get("quant_method") or "").lower(), values, place)


def _object(file: Path) -> dict[str, Any]:
    """The object in a JSON file; an empty one if there is no such file."""
    return read_object(file) if file.is_file() else {}


class Fields:
    """The fields of one JSON object, ticked off as they are understood.

    Faults are recorded in `problems`, so that one error can name all of them.
    """

    def __init__(self, values: Mapping[str, Any], place: str, problems: Problems) -> None:
        self._values = values
        self._place = place
        self._problems = problems
        self._known = {"quant_method"}

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def get(self, name: str) -> Any:
        """Gives a field, None where it is absent, and counts it as understood."""
        self._known.add(name)
        return self._values.get(name)

    def one_of(self, name: str, accepted: Collection[Any], default: Any) -> Any:
        """Gives a field that takes few values.

        Args:
            name: the field.
            accepted: its values; names in small letters, and letters count as small.
            default: what stands in for an absent, null or refused value.

        Returns:
            The value or the default.
        """
        value = self.get(name)
        if value is None:
            return default
        value = value.lower() if isinstance(value, str) else value
        for choice in accepted:
            if type(choice) is type(value) and choice == value:
                return value
        self.refuse(name, value, ", ".join(json.dumps(choice) for choice in accepted))
        return default

    def size(self, name: str, default: int | None, accepted: Collection[int] = ()) -> int | None:
        """Gives a positive integer, or one of `accepted` where those are given."""
        value = self.get(name)
        if value is None:
            return default
        if type(value) is int and (value in accepted if accepted else value > 0):
            return value
        allowed = ", ".join(map(str, accepted)) or "a positive integer"
        self.refuse(name, value, allowed)
        return default

    def none(self, *names: str) -> None:
        """Refuses fields that are anything but absent, null, false or empty."""
        for name in names:
            if value := self.get(name):
                self.refuse(name, value, "none; weights made with it are not read")

    def objects(self, name: str) -> dict[str, Fields]:
        """Gives the objects inside a field by name, each with fields of its own."""
        value = self.get(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            self.refuse(name, value, "an object")
            return {}
        found = {}
        for key, inner in value.items():
            place = f"{self._place}.{name}.{show(key)}"
            if isinstance(inner, dict):
                found[key] = Fields(inner, place, self._problems)
            elif inner is not None:
                self._add_refusal(place, inner, "an object")
        return found

    def object(self, name: str) -> Fields | None:
        """Gives the object in a field; None where it is absent, null or refused."""
        value = self.get(name)
        if isinstance(value, dict):
            return Fields(value, f"{self._place}.{name}", self._problems)
        if value is not None:
            self.refuse(name, value, "an object or null")
        return None

    def refuse(self, name: str, value: object, accepted: str) -> None:
        """Records that a field has a value that is not understood."""
        self._add_refusal(f"{self._place}.{name}", value, accepted)

    def close(self, method: str, harmless: Collection[str]) -> None:
        """Records the fields that nobody asked for.

        Args:
            method: whose fields they are, for the message.
            harmless: fields that do not change how weights are read.
        """
        known = self._known.union(harmless)
        unknown = [name for name in self._values if name not in known]
        self._problems.add(
            f"unknown fields; understood for {method} are {', '.join(sorted(known))}",
            *(f"{self._place}.{show(name)}: {_brief(self._values[name])}" for name in unknown),
        )

    def _add_refusal(self, place: str, value: object, accepted: str) -> None:
        self._problems.add(
            "values that are not understood", f"{place} is {_brief(value)}; accepted: {accepted}"
        )


def _brief(value: object) -> str:
    return show(json.dumps(value))
