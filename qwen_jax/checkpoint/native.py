"""What marks a folder that the converter wrote, and the record that it left there.

A native folder is a Hugging Face folder in the tree's own form. Each shard states the version of
that form in its metadata, so that a shard is never read by a program too old for it.
`conversion.json` records where the tensors came from, and their checksums.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args, get_type_hints

from ..errors import CheckpointError
from .mapping import Layout
from .problems import show

FORMAT_VERSION = 1
VERSION_KEY = "qwen_jax_format_version"
RECORD = "conversion.json"

# Readers of other projects look for "format".
SHARD_METADATA: Mapping[str, str] = {"format": "pt", VERSION_KEY: str(FORMAT_VERSION)}


def refuse_other_version(version: object) -> None:
    """Raises if a folder is of a version that this program does not know.

    Args:
        version: what the folder states; None where it states none, as folders that the converter
            did not write.

    Raises:
        CheckpointError: names the version and the one that is read.
    """
    if version is not None and str(version) != str(FORMAT_VERSION):
        raise CheckpointError(
            f"{VERSION_KEY} is {show(version)}; this program reads {FORMAT_VERSION}: "
            "upgrade qwen-jax, or convert the original release again"
        )


@dataclass(frozen=True, kw_only=True)
class Record:
    """The content of `conversion.json`.

    Attributes:
        layout: how a Hugging Face folder of this model groups its tensors, for export.
        formats: number of matrices that were dequantised, by format.
        skipped: number of tensors that were left out, by kind.
        adapters: what was merged, one description an adapter.
        added_tokens: number of tokens that were added to the vocabulary.
        checksums: SHA-256 of each tensor's bytes, as hexadecimal digits, by key.
    """

    layout: Layout
    formats: Mapping[str, int] = field(default_factory=dict)
    skipped: Mapping[str, int] = field(default_factory=dict)
    adapters: tuple[str, ...] = ()
    added_tokens: int = 0
    checksums: Mapping[str, str] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Writes the record into a folder."""
        content = {"format_version": FORMAT_VERSION, **dataclasses.asdict(self)}
        (folder / RECORD).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_record(folder: Path) -> Record | None:
    """Reads the record of a native folder.

    Args:
        folder: any model folder.

    Returns:
        The record, or None where the folder has none: the converter did not write it.

    Raises:
        CheckpointError: the record is damaged, or of another version.
    """
    file = folder / RECORD
    if not file.is_file():
        return None
    try:
        content = json.loads(file.read_bytes())
        refuse_other_version(content.pop("format_version"))
        layout = _layout(content.pop("layout"))
        content["adapters"] = tuple(content["adapters"])
        record = Record(layout=layout, **content)
        if not all(isinstance(value, str) for value in record.checksums.values()):
            raise TypeError("checksums are not text")
    except CheckpointError as error:
        raise CheckpointError(f"{file}: {error}") from error
    except (ValueError, RecursionError, OSError, AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{file} is damaged ({type(error).__name__}: {error}); convert the original again"
        ) from error
    return record


def _layout(values: dict[str, Any]) -> Layout:
    layout = Layout(**values)
    for name, kind in get_type_hints(Layout).items():
        if getattr(layout, name) not in get_args(kind):
            raise ValueError(f"layout.{name} is {getattr(layout, name)!r}")
    return layout
