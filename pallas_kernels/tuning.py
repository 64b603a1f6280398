"""Measured ways to cut the work of kernels, by kind of device.

A file for each kind of device, such as `nvidia-h200.json`, the kind in lower case with hyphens for
spaces: those of the package in `tuning_data`, and those that `qwen-jax tune` wrote in `folder()`,
which go first.

    {"format": 2, "device": "NVIDIA H200", "jax": {"0.11": {"delta_rule pass": {
        "batch=32 heads=32 widths=128x128 bfloat16": {
            "config": {"kind": "PassConfig", "tile": 64, "num_warps": 4, "num_stages": 1},
            "seconds": 0.0014, "heuristic_seconds": 0.0015}}}}}

What suits a compiler's code may not suit its next version's, so entries count for one minor version
of JAX, and a file may have some for several. The name in there is the kernel's, and the inner one a
shape: a key that the kernel's `config.py` makes of the dimensions that matter to it. "config" has
the class and the fields of its configuration there, and the times are of the work that it was
measured in. A shape without an entry is left to the kernel's heuristic.
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
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, TypeVar

import jax

from ._compat import Target

FORMAT = 2
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
        TuningError: the entry's class, or the names or types of its fields, are not the kernel's.
    """
    if (heard := _heard.get()) is not None:
        heard[kernel, key] = Decision(heuristic, tuple(c for c in others() if c != heuristic))
    tried = _tried.value
    if tried is not None:
        return dict(tried[1]).get((kernel, key), heuristic)
    entry = table(target.kind).get(kernel, {}).get(key)
    if entry is None:
        return heuristic
    try:
        return built(entry.get("config"), kinds or (type(heuristic),))
    except TuningError as error:
        raise TuningError(
            f"{entry['file']}: the entry of {kernel} for {key!r}: {error}. Run `qwen-jax tune` "
            "again, or remove the entry"
        ) from error


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
    """All that was measured on this kind of device, the user's first; read once a process.

    Each entry says its "file".
    """
    own = folder() / file_name(kind)
    return merged(_from_file(packaged(kind), kind), _from_file(own, kind, own=True))


def packaged(kind: str) -> Traversable:
    """The package's file for this kind of device; there may be none."""
    return resources.files("pallas_kernels") / "tuning_data" / file_name(kind)


def _from_file(file: Traversable, kind: str, *, own: bool = False) -> Table:
    """What a file has that counts here; who wrote it themselves is told if it has nothing."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        reason = mismatch(content, kind)
    except (OSError, ValueError) as error:
        content, reason = {}, str(error)
    versions = {} if reason else content["jax"]
    if own and jax_version() not in versions:
        reason = reason or f"it is for jax {', '.join(versions)}, and this is {jax_version()}"
        warnings.warn(
            f"the tuning file {file} is left aside: {reason}. Run `qwen-jax tune` again, or remove "
            "it",
            TuningWarning,
            stacklevel=3,
        )
    return {
        kernel: {key: {**entry, "file": str(file)} for key, entry in shapes.items()}
        for kernel, shapes in versions.get(jax_version(), {}).items()
    }


def merged(first: Table, second: Table) -> Table:
    """Both tables' entries; the second's where both have one."""
    return {
        kernel: first.get(kernel, {}) | second.get(kernel, {}) for kernel in {**first, **second}
    }


def content_of(kind: str, versions: Mapping[str, Table]) -> dict[str, Any]:
    """What a file for this kind of device holds, of entries by version of JAX."""
    return {"format": FORMAT, "device": kind, "jax": dict(versions)}


def mismatch(content: Any, kind: str) -> str | None:
    """Why a file is none for this kind of device, whatever JAX it is for; None if it is one."""
    if not isinstance(content, dict) or "format" not in content:
        return "it is no tuning file"
    wanted = {"format": FORMAT, "device": kind}
    wrong = [
        f"its {name} is {content.get(name)!r}, and here it is {value!r}"
        for name, value in wanted.items()
        if content.get(name) != value
    ]
    if not wrong and not _nested(content.get("jax"), 4):
        wrong = ['its "jax" is not entries by version, kernel and shape']
    return "; ".join(wrong) or None


def _nested(value: Any, depth: int) -> bool:
    """Whether it is dictionaries of dictionaries, so many deep."""
    if not isinstance(value, dict):
        return False
    return depth == 1 or all(_nested(each, depth - 1) for each in value.values())


def as_fields(config: Any) -> dict[str, Any]:
    """A configuration as an entry's "config"."""
    return {"kind": type(config).__name__, **dataclasses.asdict(config)}


def built(fields: Any, kinds: Sequence[type]) -> Any:
    """The configuration of an entry's "config".

    Raises:
        TuningError: it is none of these classes, or a field's name or type is not the class's.
    """
    named = {kind.__name__: kind for kind in kinds}
    if not isinstance(fields, dict) or fields.get("kind") not in list(named):
        raise TuningError(
            f"its config is {fields!r}; accepted are the fields of {' or '.join(named)}, and which "
            "of them as `kind`"
        )
    return _instance(
        named[fields["kind"]], {name: each for name, each in fields.items() if name != "kind"}
    )


def _instance(kind: type, fields: Any) -> Any:
    hints = typing.get_type_hints(kind)
    needed = {each.name for each in dataclasses.fields(kind) if each.default is dataclasses.MISSING}
    if not isinstance(fields, dict) or not needed <= fields.keys() <= hints.keys():
        raise TuningError(
            f"its config has {fields!r} for a {kind.__name__}; accepted are the fields "
            f"{', '.join(hints)}"
        )
    values = {}
    for name, value in fields.items():
        hint = hints[name]
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            value = _instance(hint, value)
        elif type(value) is not hint:
            raise TuningError(
                f"its field {name} is {value!r}, which is no {hint.__name__}: accepted is a "
                f"number such as {getattr(kind, name, 4)}"
            )
        values[name] = value
    return kind(**values)
