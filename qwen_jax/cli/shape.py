"""A model argument to a configuration: the name of a released shape, a folder, or `demo`."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path

from ..config import QwenConfig
from ..configuration.presets import PRESET_NAMES
from ..errors import RequestError

_PREFIXES = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_MEMORY = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kmgt]?)(i?)b)?", re.IGNORECASE | re.ASCII)


@dataclasses.dataclass(frozen=True)
class Shape:
    """What a model argument names.

    Attributes:
        name: the argument.
        config: the configuration.
        folder: where its files are; None for a preset.
    """

    name: str
    config: QwenConfig
    folder: Path | None


def find_shape(name: str) -> Shape:
    """The shape that a model argument names. A folder of a preset's name goes before the preset.

    Raises:
        RequestError: neither a folder nor a preset.
        CheckpointError: a path that leads to no folder.
        ConfigError: the folder's configuration is malformed or not implemented.
    """
    if not Path(name).exists() and name.lower() in PRESET_NAMES:
        return Shape(name, QwenConfig.preset(name), None)
    from ..loading import DEMO, find_folder

    if name != DEMO and not Path(name).exists() and os.sep not in name:
        raise RequestError(
            f"there is no folder and no preset {name!r}; accepted are the path of a model folder, "
            f"demo, and the presets {', '.join(PRESET_NAMES)}"
        )
    folder = find_folder(name)
    return Shape(name, QwenConfig.from_hf(folder), folder)


def parse_memory(text: str) -> int:
    """Bytes from "24GB" (10^9 each), "24GiB" (2^30 each), "800MB", or a plain number of bytes.

    Raises:
        RequestError: anything else, and 0.
    """
    match = _MEMORY.fullmatch(text.strip())
    value = 0
    if match is not None:
        number, prefix, binary = match.groups(default="")
        value = int(float(number) * (1024 if binary else 1000) ** _PREFIXES[prefix.lower()])
    if value < 1:
        raise RequestError(
            f"--memory is {text!r}; accepted are amounts such as 24GB, 22.5GiB, 800MB, or a "
            "number of bytes"
        )
    return value
