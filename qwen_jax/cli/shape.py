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
_LARGEST = 2**63
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?)b?|b)?", re.IGNORECASE | re.ASCII)


@dataclasses.dataclass(frozen=True)
class Shape:
    """What a model argument names.

    Attributes:
        name: the argument.
        config: the configuration.
        folder: where its files are; None for a preset.
        fetched: whether the folder is in the Hub's cache, where weights may be missing.
    """

    name: str
    config: QwenConfig
    folder: Path | None
    fetched: bool = False


def find_shape(name: str, revision: str | None = None, *, weights: bool = True) -> Shape:
    """The shape that a model argument names. A folder of a preset's name goes before the preset.

    Args:
        name: a preset, a folder, "demo", or the id of a model on the Hub.
        revision: branch, tag or commit, for the Hub alone.
        weights: whether weights to run are to be fetched from the Hub.

    Raises:
        RequestError: neither a folder nor a preset, or a revision of one.
        CheckpointError: a path that leads to no folder, or a Hub model that cannot be fetched.
        ConfigError: the folder's configuration is malformed or not implemented.
    """
    if not Path(name).exists() and name.lower() in PRESET_NAMES:
        if revision is not None:
            raise RequestError(f"--revision is for models on the Hub; {name} is a preset")
        return Shape(name, QwenConfig.preset(name), None)
    from .. import hub
    from ..loading import DEMO, find_folder, find_runnable

    if name != DEMO and not Path(name).exists() and os.sep not in name:
        raise RequestError(
            f"there is no folder and no preset {name!r}; accepted are the path of a model folder, "
            "demo, organisation/name for a model on the Hub, and the presets "
            f"{', '.join(PRESET_NAMES)}"
        )
    folder = (
        find_runnable(name, revision) if weights else find_folder(name, revision, weights=False)
    )
    return Shape(name, QwenConfig.from_hf(folder), folder, fetched=hub.is_hub_id(name))


def parse_size(text: str, flag: str) -> int:
    """Bytes from "24GB" or "24G" (10^9 each), "24GiB" (2^30 each), or a plain number of bytes.

    Args:
        text: the amount.
        flag: where it was given, for the message.

    Raises:
        RequestError: anything else, 0, and more than 2^63.
    """
    match = _SIZE.fullmatch(text.strip())
    value = 0
    if match is not None:
        number, prefix, binary = match.groups(default="")
        amount = float(number) * (1024 if binary else 1000) ** _PREFIXES[prefix.lower()]
        value = int(amount) if amount < _LARGEST else 0
    if value < 1:
        raise RequestError(
            f"{flag} is {text!r}; accepted are amounts such as 24GB, 22.5GiB, 800MB, or a "
            "number of bytes"
        )
    return value
