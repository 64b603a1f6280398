"""The file of tokens to add to a vocabulary: what it asks for, checked entry by entry.

A JSON list, or one JSON value a line. An entry is a text, or an object with these fields:

    {"token": "<|tool|>", "pieces": ["tool", 27], "weights": [3, 1], "special": true}

`pieces` are tokens that the vocabulary has, by text or by id, of which the new rows are the mean;
without them, those into which the text is split so far. `weights` need not sum to 1; without them
all pieces count the same. `special` tokens are left out where text is decoded without them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qwen_jax.checkpoint.json_file import without_duplicates
from qwen_jax.checkpoint.problems import Problems, listed, show
from qwen_jax.errors import CheckpointError, RequestError
from qwen_jax.text.unicode import require_unicode

_FIELDS = ("token", "pieces", "weights", "special")
ADVICE = (
    'Accepted are a JSON list or one JSON value a line, each a text or {"token": text, "pieces": '
    '[texts or ids], "weights": [numbers], "special": true or false}, all but token optional.'
)


@dataclass(frozen=True)
class Entry:
    """What one entry asks for.

    Attributes:
        place: where it stands, for messages: "line 3" or "entry 3".
        token: the text of the new token.
        pieces: texts or ids of existing tokens, at least one; None for those of the text.
        weights: one a piece, finite, not negative, not all 0; None for equal ones.
        special: whether the token is a special one.
    """

    place: str
    token: str
    pieces: tuple[str | int, ...] | None
    weights: tuple[float, ...] | None
    special: bool


def read_entries(file: Path) -> list[Entry]:
    """Reads the file.

    Returns:
        The entries in their order, at least one; no token is in two of them.

    Raises:
        CheckpointError: the file cannot be read, is empty, or has faulty entries, all named.
    """
    problems = Problems()
    values = _values(file, problems)
    entries: list[Entry] = []
    for place, value in values:
        try:
            entries.append(_entry(place, value))
        except CheckpointError as error:
            problems.add("faulty entries", f"{place}: {error}")
    first: dict[str, str] = {}
    for entry in entries:
        before = first.setdefault(entry.token, entry.place)
        if before != entry.place:
            problems.add("tokens given twice", f"{entry.place}: {quote(entry.token)}, as {before}")
    problems.raise_if_any(f"{file} cannot be used as a list of tokens", ADVICE)
    if not entries:
        raise CheckpointError(f"{file} holds no tokens. {ADVICE}")
    return entries


def quote(text: str) -> str:
    """A token as it is shown: in quotes, on one line, of bounded length."""
    return show(repr(text))


def _values(file: Path, problems: Problems) -> list[tuple[str, Any]]:
    """The JSON values of a file, each with its place; what is no JSON goes to the problems."""
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file} cannot be read as UTF-8 text ({error}). {ADVICE}") from error
    if text.lstrip().startswith("["):
        try:
            values = _parsed(text)
        except CheckpointError as error:
            raise CheckpointError(f"{file} is not JSON: {error}. {ADVICE}") from error
        return [(f"entry {number}", value) for number, value in enumerate(values, 1)]
    found = []
    # Not splitlines: a JSON text may hold line separators other than the line feed.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            found.append((f"line {number}", _parsed(line)))
        except CheckpointError as error:
            problems.add("lines that are not JSON", f"line {number}: {error}")
    return found


def _parsed(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=without_duplicates)
    except json.JSONDecodeError as error:
        within = f"line {error.lineno}, " if "\n" in text.rstrip("\n") else ""
        raise CheckpointError(f"{error.msg} at {within}column {error.colno}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(str(error).partition("\n")[0]) from None


def _entry(place: str, value: Any) -> Entry:
    if isinstance(value, str):
        value = {"token": value}
    if not isinstance(value, dict):
        raise CheckpointError(f"a JSON {_kind(value)}, where a text or an object is needed")
    unknown = [name for name in value if name not in _FIELDS]
    if unknown:
        raise CheckpointError(f"unknown fields {listed(unknown)}; known are {', '.join(_FIELDS)}")
    special = value.get("special")
    if not isinstance(special, bool | None):
        raise CheckpointError(f"special is a JSON {_kind(special)}, where true or false is needed")
    pieces = _pieces(value.get("pieces"))
    weights = _weights(value.get("weights"))
    if pieces is not None and weights is not None and len(pieces) != len(weights):
        raise CheckpointError(f"{len(weights)} weights for {len(pieces)} pieces")
    return Entry(place, _text(value.get("token"), "token"), pieces, weights, bool(special))


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str) or not value:
        kind = "an empty text" if value == "" else f"a JSON {_kind(value)}"
        raise CheckpointError(f"{what} is {kind}, where a text is needed")
    try:
        return require_unicode(value, what)
    except RequestError as error:
        raise CheckpointError(str(error)) from None


def _pieces(value: Any) -> tuple[str | int, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not value:
        kind = "an empty list" if value == [] else f"a JSON {_kind(value)}"
        raise CheckpointError(f"pieces is {kind}, where a list of texts or ids is needed")
    return tuple(
        piece if isinstance(piece, int) and not isinstance(piece, bool) else _text(piece, "a piece")
        for piece in value
    )


def _weights(value: Any) -> tuple[float, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list):
        raise CheckpointError(f"weights is a JSON {_kind(value)}, where a list is needed")
    weights = tuple(map(_weight, value))
    if not any(weights):
        raise CheckpointError("the weights sum to 0; one of them at least must be above it")
    return weights


def _weight(value: Any) -> float:
    try:
        weight = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        weight = math.nan
    if isinstance(value, str) or not math.isfinite(weight) or weight < 0:
        raise CheckpointError(
            f"a weight is {show(json.dumps(value))}; accepted are finite numbers from 0 on"
        )
    return weight


def _kind(value: Any) -> str:
    names = {dict: "object", list: "list", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "number")


def shares(weights: Sequence[float] | None, count: int) -> tuple[float, ...]:
    """Weights as shares of 1, equal ones for None; `count` is the number of pieces."""
    if weights is None:
        return (1 / count,) * count
    largest = max(weights)  # first, since a sum of large numbers is infinite
    scaled = [weight / largest for weight in weights]
    return tuple(weight / math.fsum(scaled) for weight in scaled)
