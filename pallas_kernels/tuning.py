"""Measured ways to cut the work of kernels, by kind of device.

`tuning_data/<kind of device>.json` holds them, the kind in lower case with hyphens for spaces:

    {"delta_rule pass": {"batch=32 heads=32 widths=128x128 bfloat16": {"tile": 64, ...}}}

The outer name is the kernel's. The inner one is a shape: a key that the kernel's `config.py` makes
of the dimensions that matter to it. The rest are the fields of its configuration there. A shape
without an entry is left to the heuristic in the same file.
"""

from __future__ import annotations

import functools
import json
from importlib import resources
from typing import Any

from ._compat import Target

Table = dict[str, dict[str, dict[str, Any]]]


def tuned(kernel: str, target: Target, key: str) -> dict[str, Any] | None:
    """The fields that were measured to be best, or None if this was not measured.

    Args:
        kernel: name of the kernel.
        target: the device.
        key: the shape, as the kernel's `config.py` writes it.
    """
    return table(target.kind).get(kernel, {}).get(key)


@functools.cache
def table(kind: str) -> Table:
    """All that was measured on this kind of device; read once."""
    name = f"{kind.lower().replace(' ', '-')}.json"
    file = resources.files("pallas_kernels") / "tuning_data" / name
    return json.loads(file.read_text()) if file.is_file() else {}
