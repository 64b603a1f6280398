"""Measured ways to cut the work of kernels, by kind of device.

A file for each kind of device, such as `nvidia-h200.json`, the kind in lower case with hyphens for
spaces: those of the package in `tuning_data`, and those that `qwen-jax tune` wrote in `folder()`,
which go first.

    {"format": 1, "device": "NVIDIA H200", "jax": "0.11", "entries": {"delta_rule pass": {
        "batch=32 heads=32 widths=128x128 bfloat16": {
            "config": {"kind": "PassConfig", "tile": 64, "num_warps": 4, "num_stages": 1},
            "seconds": 0.0014, "heuristic_seconds": 0.0015}}}}

The outer name is the kernel's. The inner one is a shape: a key that the kernel's `config.py` makes
of the dimensions that matter to it. "config" has the class and the fields of its configuration
there, and the times are of the work that it was measured in. What suits a compiler's code may not
suit its next version's, so a file counts for one minor version of JAX. A shape without an entry is
left to the kernel's heuristic.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import json
import os
import typing
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

import jax

from ._compat import Target

FORMAT = 1
C = TypeVar("C")
# Kernel and shape.
Place = tuple[str, str]
Table = dict[str, dict[str, dict[str, Any]]]


class TuningError(ValueError):
    """An entry of a tuning file has no meaning."""


class TuningWarning(UserWarning):
    """A tuning file of the user's is left aside."""


@dataclasses.dataclass(frozen=True)
class Decision:
    """A configuration that a traced call asked for.

    Attributes:
        heuristic: what it gets without any entry.
        others: what else may be tried.
    """

    heuristic: Any
    others: tuple[Any, ...]


# JAX traces again where its value changes: configurations to use in place of all that was measured.
_tried = jax.make_user_context(default_value=None)
_heard: contextvars.ContextVar[dict[Place, Decision] | None] = contextvars.ContextVar(
    "heard", default=None
)


def decide(
    kernel: str,
    target: Target,
    key: str,
    heuristic: C,
    others: Callable[[], Sequence[Any]],
    kinds: Sequence[type] = (),
) -> C:
    """How a kernel's work is cut: as was measured to be best, else by the heuristic.

    Args:
        kernel: its name.
        target: the device.
        key: the shape, as the kernel's `config.py` writes it.
        heuristic: the configuration without a measurement.
        others: configurations that may be better, for who measures.
        kinds: classes of configurations, if the heuristic's is not the only one.

    Raises:
        TuningError: the entry's class or fields are not the kernel's.
    """
    if (heard := _heard.get()) is not None:
        heard[kernel, key] = Decision(heuristic, tuple(c for c in others() if c != heuristic))
    tried = _tried.value
    if tried is not None:
        return dict(tried[1]).get((kernel, key), heuristic)
    entry = table(target.kind).get(kernel, {}).get(key)
    if entry is None:
        return heuristic
    return _built(kernel, key, entry.get("config"), kinds or (type(heuristic),))


@contextlib.contextmanager
def listening() -> Iterator[dict[Place, Decision]]:
    """Every decision of calls that are traced inside goes into the dictionary; no file counts."""
    heard: dict[Place, Decision] = {}
    token = _heard.set(heard)
    try:
        # A value that was never there: what was traced before is traced again.
        with _tried((_Once(), ())):
            yield heard
    finally:
        _heard.reset(token)


@contextlib.contextmanager
def trying(configs: Mapping[Place, Hashable]) -> Iterator[None]:
    """Calls that are traced inside use these, else their heuristics; no file counts."""
    with _tried((None, tuple(sorted(configs.items(), key=lambda item: item[0])))):
        yield


class _Once:
    """Equal to nothing but itself."""


def varied(config: C, **values: Sequence[Any]) -> list[C]:
    """The configuration with each of these values of one field at a time."""
    return [
        dataclasses.replace(config, **{name: value})  # type: ignore[type-var]
        for name, options in values.items()
        for value in options
    ]


def folder() -> Path:
    """Where a user's tuning files are: $QWEN_JAX_TUNING, or ~/.local/share/qwen-jax/tuning."""
    if named := os.environ.get("QWEN_JAX_TUNING"):
        return Path(named)
    data = os.environ.get("XDG_DATA_HOME")
    return Path(data or os.path.expanduser("~/.local/share")) / "qwen-jax" / "tuning"


def file_name(kind: str) -> str:
    """Of the file for a kind of device."""
    return f"{kind.lower().replace(' ', '-')}.json"


def jax_version() -> str:
    """The minor version of JAX, which files are made for: "0.11"."""
    return ".".join(jax.__version__.split(".")[:2])


@functools.cache
def table(kind: str) -> Table:
    """All that was measured on this kind of device, the user's first; read once a process."""
    content = packaged(kind)
    found: Table = {} if mismatch(content, kind) else content["entries"]
    own = folder() / file_name(kind)
    if own.is_file():
        found = merged(found, _own_entries(own, kind))
    return found


def packaged(kind: str) -> dict[str, Any]:
    """What the package's file for this kind of device holds; nothing if there is none."""
    file = resources.files("pallas_kernels") / "tuning_data" / file_name(kind)
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def merged(first: Table, second: Table) -> Table:
    """Both tables' entries; the second's where both have one."""
    return {
        kernel: first.get(kernel, {}) | second.get(kernel, {}) for kernel in {**first, **second}
    }


def content_of(kind: str, entries: Table) -> dict[str, Any]:
    """What a file for this kind of device and this JAX holds."""
    return {"format": FORMAT, "device": kind, "jax": jax_version(), "entries": entries}


def mismatch(content: Any, kind: str) -> str | None:
    """Why a file does not count here; None if it does."""
    if not isinstance(content, dict) or not isinstance(content.get("entries"), dict):
        return "it is no tuning file"
    wanted = {"format": FORMAT, "device": kind, "jax": jax_version()}
    wrong = [
        f"its {name} is {content.get(name)!r}, and here it is {value!r}"
        for name, value in wanted.items()
        if content.get(name) != value
    ]
    return "; ".join(wrong) or None


def _own_entries(path: Path, kind: str) -> Table:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        reason = mismatch(content, kind)
    except (OSError, ValueError) as error:
        content, reason = {}, str(error)
    if reason is None:
        return content["entries"]
    warnings.warn(
        f"the tuning file {path} is left aside: {reason}. Run `qwen-jax tune` again, or remove it",
        TuningWarning,
        stacklevel=2,
    )
    return {}


def as_fields(config: Any) -> dict[str, Any]:
    """A configuration as an entry's "config"."""
    return {"kind": type(config).__name__, **dataclasses.asdict(config)}


def _built(kernel: str, key: str, fields: Any, kinds: Sequence[type]) -> Any:
    named = {kind.__name__: kind for kind in kinds}
    try:
        fields = dict(fields)
        return _instance(named[fields.pop("kind")], fields)
    except (KeyError, TypeError, ValueError) as error:
        raise TuningError(
            f"the tuning entry of {kernel} for {key!r} is {fields!r}; accepted are the fields of "
            f"{' or '.join(named)} and their `kind` ({error}). Run `qwen-jax tune` again, or "
            f"remove the entry from the file in {folder()}"
        ) from error


def _instance(kind: type, fields: Mapping[str, Any]) -> Any:
    hints = typing.get_type_hints(kind)
    return kind(
        **{
            name: _instance(hints[name], value) if isinstance(value, dict) else value
            for name, value in fields.items()
        }
    )
