"""Tokens added to the tokenizer files of a folder, so that every reader sees them alike."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qwen_jax.checkpoint.json_file import read_object
from qwen_jax.checkpoint.problems import Problems
from qwen_jax.errors import CheckpointError
from qwen_jax.text import Tokenizer

from .added_tokens import quote

Object = dict[str, Any]


@dataclass(frozen=True)
class AddedToken:
    """A token with its id.

    Attributes:
        id: the id.
        text: what it stands for, in Unicode's normal form of the tokenizer.
        special: whether it is left out where text is decoded without special tokens.
    """

    id: int
    text: str
    special: bool

    def flags(self) -> Object:
        """Its entry in tokenizer files, without the id.

        Plain tokens are looked for in normalised text, so that both spellings of an accent are
        found, and after special tokens, which they so cannot tear.
        """
        return {
            "content": self.text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": not self.special,
            "special": self.special,
        }


def add_to_files(folder: Path, tokens: Sequence[AddedToken]) -> None:
    """Adds tokens to the tokenizer files of a folder, those of them that it has.

    Args:
        folder: has `tokenizer.json`. Files are replaced, so that a link keeps what it leads to.
        tokens: in the order of their ids, which follow the tokenizer's last one.

    Raises:
        CheckpointError: a file is damaged, or the tokenizer does not take a token for what it is.
    """
    for name, change in _CHANGES.items():
        if os.path.lexists(folder / name):
            _rewrite(folder / name, change, tokens)
    _check(folder, tokens)


def files() -> tuple[str, ...]:
    """Names of the files that `add_to_files` may change."""
    return tuple(_CHANGES)


def _tokenizer(content: Object, tokens: Sequence[AddedToken]) -> None:
    content["added_tokens"] = [
        *(content.get("added_tokens") or ()),
        *({"id": token.id} | token.flags() for token in tokens),
    ]


def _tokenizer_config(content: Object, tokens: Sequence[AddedToken]) -> None:
    # A list of some tokens alone would hide the others from some readers: none is begun here.
    if isinstance(content.get("added_tokens_decoder"), dict):
        content["added_tokens_decoder"] |= {str(token.id): token.flags() for token in tokens}
    _special_tokens(content, tokens)


def _special_tokens(content: Object, tokens: Sequence[AddedToken]) -> None:
    """Special tokens without a role of their own, by the names that both kinds of files use."""
    special = [token.text for token in tokens if token.special]
    for name in ("additional_special_tokens", "extra_special_tokens"):
        if isinstance(content.get(name), list):
            content[name] = [*content[name], *special]


def _ids(content: Object, tokens: Sequence[AddedToken]) -> None:
    content |= {token.text: token.id for token in tokens}


_CHANGES: dict[str, Callable[[Object, Sequence[AddedToken]], None]] = {
    "tokenizer.json": _tokenizer,
    "tokenizer_config.json": _tokenizer_config,
    "special_tokens_map.json": _special_tokens,
    "added_tokens.json": _ids,
}


def _rewrite(
    file: Path,
    change: Callable[[Object, Sequence[AddedToken]], None],
    tokens: Sequence[AddedToken],
) -> None:
    content = read_object(file)
    change(content, tokens)
    # Python's indenting encoder takes seconds for a vocabulary of usual size: a line a field.
    fields = (f"  {_json(name)}: {_json(value)}" for name, value in content.items())
    text = "{\n" + ",\n".join(fields) + "\n}\n"
    new = file.with_name(f".{file.name}.new")
    new.write_text(text, encoding="utf-8")
    os.replace(new, file)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _check(folder: Path, tokens: Sequence[AddedToken]) -> None:
    """Reads the files back and holds the tokenizer against what was asked for."""
    tokenizer = Tokenizer.from_folder(folder)
    if tokenizer is None:
        raise CheckpointError(f"{folder} has no tokenizer.json, to which tokens could be added")
    problems = Problems()
    for token in tokens:
        ids, text = tokenizer.encode(token.text), tokenizer.decode([token.id])
        if ids != [token.id]:
            parts = " + ".join(quote(tokenizer.decode([i])) for i in ids)
            problems.add("tokens that others cut", f"{quote(token.text)} is read as {parts}")
        elif text != token.text:
            problems.add(
                "tokens that would be decoded as other text",
                f"{quote(token.text)} as {quote(text)}",
            )
    problems.raise_if_any(
        f"{folder}: the tokenizer cannot have these tokens",
        "A token must not contain a special one, unless it is special itself. Letters such as é or "
        "ß are also names of bytes in byte-level vocabularies: a token of nothing but such letters "
        "and ASCII without spaces is decoded as bytes (by every program that uses tokenizer.json). "
        "Begin it with a space, or leave it out.",
    )
