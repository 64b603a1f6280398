"""JSON files of a model folder, read as strictly as they were written."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from .problems import listed, show

# The longest header of a safetensors file; an index of such length would name a million tensors.
LONGEST = 100_000_000


def read_json(file: Path) -> Any:
    """Reads a JSON file of at most `LONGEST` bytes.

    Args:
        file: the file.

    Returns:
        The value in it.

    Raises:
        CheckpointError: the file cannot be read, is too long or not JSON, or an object in it gives
            a key twice.
    """
    try:
        with file.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            if size > LONGEST:
                raise CheckpointError(f"it has {size} bytes, more than {LONGEST}")
            text = stream.read()
        return json.loads(text, object_pairs_hook=without_duplicates)
    except (ValueError, RecursionError, OSError) as error:
        raise CheckpointError(f"{show(file)} cannot be read: {error}") from error


def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Builds a JSON object, as `object_pairs_hook` of `json.loads`; refuses a key given twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = [name for name, _ in pairs if name in seen or seen.add(name)]
        raise CheckpointError(f"duplicate keys: {listed(dict.fromkeys(twice))}")
    return found


def read_object(file: Path) -> dict[str, Any]:
    """Reads a JSON file that holds an object; see `read_json`.

    Raises:
        CheckpointError: the file cannot be read, or holds something else.
    """
    content = read_json(file)
    if not isinstance(content, dict):
        raise CheckpointError(f"{show(file)} is not a JSON object but a {type(content).__name__}")
    return content
