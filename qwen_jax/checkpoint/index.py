"""The index of a model folder: which of its files holds which tensor."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from ..errors import CheckpointError
from .json_file import read_json
from .problems import Problems, show

INDEX = "model.safetensors.index.json"


def read_index(file: Path) -> dict[str, str]:
    """Reads an index.

    Args:
        file: the index.

    Returns:
        The file of each tensor, by key; every one stays inside the folder.

    Raises:
        CheckpointError: the index is damaged or empty, or names a file that is not a plain path.
    """
    content = read_json(file)
    placed = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(placed, dict) or not placed:
        raise CheckpointError(
            f"{show(file)} has no weight_map that says which file holds which tensor"
        )
    problems = Problems()
    refused = [place for place in placed.values() if not _stays_inside(place)]
    problems.add("refused paths", *dict.fromkeys(map(show, refused)))
    problems.raise_if_any(
        f"{show(file)} names files that are not plain paths inside the folder",
        "Accepted: relative paths to .safetensors files, without '..' (the file may be a link).",
    )
    return placed


def _stays_inside(shard: object) -> bool:
    if not isinstance(shard, str) or not shard.isprintable() or "\\" in shard or ":" in shard:
        return False
    pure = PurePosixPath(shard)
    plain = str(pure) == shard and not pure.is_absolute() and ".." not in pure.parts
    return plain and pure.suffix == ".safetensors"
