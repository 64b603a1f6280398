"""Files of text or of token ids, as documents."""

from __future__ import annotations

import dataclasses
import io
import json
import lzma
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import RequestError
from ..text import Tokenizer

_LINE_FIELDS = ("tokens", "text", "messages")


@dataclasses.dataclass(frozen=True)
class Document:
    """Tokens that follow one another.

    Attributes:
        name: where they come from, for messages.
        tokens: int32 [N].
        is_chat: whether they went through a chat template.
    """

    name: str
    tokens: np.ndarray
    is_chat: bool = False


def read_documents(
    path: str | Path, tokenizer: Tokenizer | None, vocab_size: int
) -> tuple[Document, ...]:
    """Read one file.

    `NAME.npy` holds token ids, [N] or one document a row [*, N]. `NAME.jsonl` holds a document a
    line: a list of ids, {"tokens": ids}, {"text": text} or {"messages": a chat}, which goes through
    the tokenizer's chat template. Any other file is one document of UTF-8 text. All may be packed,
    and have `.xz` behind their names then. Special tokens that are written out in text count as
    such; none is added.

    Args:
        path: the file.
        tokenizer: the model's; needed for text and chats alone.
        vocab_size: ids are below it.

    Raises:
        RequestError: no such file, one that is not of its kind, an id outside the vocabulary, text
            without a tokenizer, or a chat that the template refuses.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
        if path.suffix == ".xz":
            data = lzma.decompress(data)
    except (OSError, lzma.LZMAError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RequestError(
            f"{path} cannot be read ({reason}); give a file of text, or of token ids as .npy or "
            ".jsonl"
        ) from error
    kind = Path(path.stem).suffix if path.suffix == ".xz" else path.suffix
    if kind == ".npy":
        named = _rows(path, data)
    elif kind == ".jsonl":
        return tuple(
            Document(name, _checked(name, ids, vocab_size), is_chat)
            for name, ids, is_chat in _lines(path, _decode(path, data), tokenizer)
        )
    else:
        named = iter([(str(path), _encode(str(path), _decode(path, data), tokenizer))])
    return tuple(Document(name, _checked(name, ids, vocab_size)) for name, ids in named)


def _decode(path: Path, data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"{path} is not UTF-8: byte 0x{data[error.start]:02x} at {error.start}; give text in "
            "UTF-8, or token ids as .npy or .jsonl"
        ) from None


def _encode(name: str, text: str, tokenizer: Tokenizer | None) -> list[int]:
    if tokenizer is None:
        raise RequestError(
            f"{name} is text, but the model folder has no tokenizer; give token ids as .npy or "
            ".jsonl"
        )
    try:
        return tokenizer.encode(text)
    except RequestError as error:
        raise RequestError(f"{name}: {error}") from error


def _rows(path: Path, data: bytes) -> Iterator[tuple[str, np.ndarray]]:
    try:
        array = np.load(io.BytesIO(data), allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise RequestError(
            f"{path} is not a .npy file of numbers; write one by numpy.save"
        ) from error
    if not isinstance(array, np.ndarray) or array.ndim not in (1, 2):
        shape = getattr(array, "shape", type(array).__name__)
        raise RequestError(f"{path} holds {shape}; accepted are ids [N], or one document a row")
    if array.ndim == 1:
        yield str(path), array
        return
    for number, row in enumerate(array):
        yield f"{path} row {number}", row


def _lines(
    path: Path, text: str, tokenizer: Tokenizer | None
) -> Iterator[tuple[str, Sequence[Any], bool]]:
    """Name, ids, and whether they were a chat."""
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        name = f"{path} line {number}"
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise RequestError(
                f"{name} is not JSON ({error}); accepted is a value a line"
            ) from None
        is_chat = isinstance(value, dict) and "messages" in value
        if isinstance(value, dict):
            value = _of_fields(name, value, tokenizer)
        if not isinstance(value, list):
            raise RequestError(
                f'{name} holds {value!r:.80}; accepted are a list of ids, {{"tokens": ids}}, '
                '{"text": text} and {"messages": a chat}'
            )
        yield name, value, is_chat


def _of_fields(name: str, value: dict[str, Any], tokenizer: Tokenizer | None) -> Any:
    """What a line's object holds; ids unless it is malformed."""
    present = [field for field in _LINE_FIELDS if field in value]
    if len(present) != 1:
        raise RequestError(
            f'{name} has the fields {sorted(value)}; accepted is one of "tokens", a list of ids, '
            '"text" and "messages"'
        )
    content = value[present[0]]
    if present == ["tokens"]:
        return content
    if present == ["messages"] and tokenizer is not None:
        try:
            content = tokenizer.apply_chat_template(content, add_generation_prompt=False)
        except RequestError as error:
            raise RequestError(f"{name}: {error}") from error
    elif present == ["text"] and not isinstance(content, str):
        raise RequestError(f"{name}: text is {content!r:.80}; accepted is a string")
    return _encode(name, content, tokenizer)


def _checked(name: str, values: Sequence[Any] | np.ndarray, vocab_size: int) -> np.ndarray:
    try:
        ids = np.asarray(values)
    except ValueError:
        raise RequestError(
            f"{name} holds lists of unequal length; accepted are token ids"
        ) from None
    if ids.size == 0:
        raise RequestError(f"{name} holds no token; give a longer text, or leave it out")
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise RequestError(f"{name} holds {ids.dtype} values {ids.shape}; accepted are token ids")
    outside = (ids < 0) | (ids >= vocab_size)
    if outside.any():
        at = int(np.argmax(outside))
        raise RequestError(
            f"{name}: id {int(ids[at])} at {at} is outside the vocabulary; accepted are 0 to "
            f"{vocab_size - 1}. Are these the ids of another model's tokenizer?"
        )
    return ids.astype(np.int32)
