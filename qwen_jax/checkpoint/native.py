"""What marks a folder that the converter wrote, and the record that it left there.

A native folder is a Hugging Face folder in the tree's own form. Each shard states the version of
that form in its metadata, so that a shard is never read by a program too old for it.
`conversion.json` records where the tensors came from, and their checksums.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args, get_type_hints

from ..errors import CheckpointError
from .json_file import read_json
from .mapping import Layout
from .problems import listed, show

FORMAT_VERSION = 1
VERSION_KEY = "qwen_jax_format_version"
RECORD = "conversion.json"
# Of a folder in codes, these have checksums too. Chat templates may be changed at will.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
)

_VERSION = "format_version"
# Fields that records of floating-point folders do without.
_OF_CODES: Mapping[str, Any] = {"recipe": "", "files": {}}
_DIGEST = re.compile(r"[0-9a-f]{64}")

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
        recipe: name of the recipe by which matrices were put in codes; empty if none was.
        files: SHA-256 of what `load` reads of a folder in codes beside its tensors, as
            `checksums.file_checksums` names it; empty for other folders, and those of versions that
            recorded none.
    """

    layout: Layout
    formats: Mapping[str, int] = field(default_factory=dict)
    skipped: Mapping[str, int] = field(default_factory=dict)
    adapters: tuple[str, ...] = ()
    added_tokens: int = 0
    checksums: Mapping[str, str] = field(default_factory=dict)
    recipe: str = ""
    files: Mapping[str, str] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Writes the record into a folder."""
        content = {_VERSION: FORMAT_VERSION, **dataclasses.asdict(self)}
        for name in _OF_CODES:
            if not content[name]:
                del content[name]
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
    if not os.path.lexists(file):
        return None
    content = read_json(file)
    try:
        return _checked(content)
    except CheckpointError as error:
        raise CheckpointError(f"{file}: {error}") from error


def _checked(content: Any) -> Record:
    if not isinstance(content, dict):
        raise CheckpointError("the record is not a JSON object; convert the original again")
    version = content.get(_VERSION)
    refuse_other_version(version if type(version) is int else json.dumps(version))
    names = [field.name for field in dataclasses.fields(Record)]
    for name, none in _OF_CODES.items():
        content.setdefault(name, none)
    faults = [f"unknown field {show(name)}" for name in content if name not in (*names, _VERSION)]
    for name in names:
        fits, expected = _FIELDS[name]
        if name not in content:
            faults.append(f"{name} is missing")
        elif not fits(content[name]):
            faults.append(f"{name} is {show(json.dumps(content[name]))}, not {expected}")
    if faults:
        raise CheckpointError(
            f"the record is damaged: {listed(faults)}; convert the original again"
        )
    values = {name: content[name] for name in names}
    layout, adapters = Layout(**values["layout"]), tuple(values["adapters"])
    return Record(**values | {"layout": layout, "adapters": adapters})


def _is_layout(value: Any) -> bool:
    kinds = get_type_hints(Layout)
    return (
        isinstance(value, dict)
        and value.keys() == kinds.keys()
        and all(value[name] in get_args(kind) for name, kind in kinds.items())
    )


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _are_counts(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_count, value.values()))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _are_files(value: Any) -> bool:
    return _are_digests(value) and all(Path(name).name == name for name in value)


def _are_digests(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(digest, str) and _DIGEST.fullmatch(digest) for digest in value.values()
    )


_FIELDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "layout": (_is_layout, "an object of known values"),
    "formats": (_are_counts, "counts by name"),
    "skipped": (_are_counts, "counts by name"),
    "adapters": (_are_texts, "a list of texts"),
    "added_tokens": (_is_count, "a count"),
    "checksums": (_are_digests, "SHA-256 digests by key"),
    "recipe": (_is_text, "a name"),
    "files": (_are_files, "SHA-256 digests by name of a file"),
}
