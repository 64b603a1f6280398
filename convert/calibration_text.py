"""Calibration tokens: windows of text files, token files and chats."""

from __future__ import annotations

import json
import lzma
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from qwen_jax.errors import RequestError
from qwen_jax.text import Tokenizer

ACCEPTED = (
    ".txt and .txt.xz (text), .npy (token ids), and .jsonl with a text, tokens or messages a line"
)


def read_calibration(
    paths: Sequence[Path],
    tokenizer: Tokenizer | None,
    vocab_size: int,
    *,
    window: int = 512,
    windows: int = 128,
) -> np.ndarray:
    """Windows of tokens from files, spread evenly over all that the files hold.

    Accepted are .txt and .txt.xz (text), .npy (token ids, one axis or [N, T]), and .jsonl with one
    object a line: {"text": ...}, {"tokens": [...]} or {"messages": [...]}; messages go through the
    model's chat template. Files are joined in the given order before they are cut.

    Args:
        paths: files, in any mixture.
        tokenizer: the model's; None where the folder has none, then only tokens are accepted.
        vocab_size: rows of the embedding.
        window: tokens of a window, T.
        windows: most windows to use; fewer where there is less text.

    Returns:
        int32 [N, T].

    Raises:
        RequestError: a file is missing, of another kind or malformed, has ids outside the
            vocabulary, or text without a tokenizer; or all are shorter than one window.
    """
    for name, value in (("window", window), ("windows", windows)):
        if value < 1:
            raise RequestError(f"{name} is {value}; accepted is 1 and more")
    if tokenizer is not None and tokenizer.vocab_size > vocab_size:
        raise RequestError(
            f"calibration: the tokenizer has {tokenizer.vocab_size} ids, the model {vocab_size}: "
            "it is not the model's. Use the tokenizer files of the model's own release"
        )
    parts = [_read(Path(path), tokenizer, vocab_size) for path in paths]
    tokens = np.concatenate([*parts, np.zeros(0, np.int32)])
    if len(tokens) < window:
        raise RequestError(
            f"calibration: {', '.join(map(str, paths)) or 'no file'} holds {len(tokens)} tokens; a "
            f"window takes {window}. Give more text, or shorter windows"
        )
    count = min(windows, len(tokens) // window)
    starts = np.linspace(0, len(tokens) - window, count).astype(np.int64)
    return np.stack([tokens[start : start + window] for start in starts])


def _read(path: Path, tokenizer: Tokenizer | None, vocab_size: int) -> np.ndarray:
    """The token ids of one file, int32."""
    try:
        if path.name.endswith((".txt", ".txt.xz")):
            open_text = lzma.open if path.suffix == ".xz" else open
            with open_text(path, "rt", encoding="utf-8") as file:
                ids = _encode(path, file.read(), tokenizer)
        elif path.suffix == ".npy":
            ids = np.load(path, allow_pickle=False)
        elif path.suffix == ".jsonl":
            lines = path.read_text(encoding="utf-8").splitlines()
            parts = [
                _entry(f"{path}:{number}", line, tokenizer)
                for number, line in enumerate(lines, 1)
                if line.strip()
            ]
            ids = np.concatenate([*parts, np.zeros(0, np.int64)])
        else:
            raise RequestError(f"calibration: {path} is of no known kind; accepted are {ACCEPTED}")
    except (OSError, EOFError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise RequestError(f"calibration: {path} cannot be read ({error})") from error
    except ValueError as error:
        if isinstance(error, RequestError):
            raise
        raise RequestError(f"calibration: {path} is no array of tokens ({error})") from error
    return _checked(path, ids, vocab_size)


def _encode(source: Path | str, text: str, tokenizer: Tokenizer | None) -> np.ndarray:
    if tokenizer is None:
        raise RequestError(
            f"calibration: {source} is text, and the model folder has no tokenizer; give its "
            "tokenizer files, or token ids (.npy)"
        )
    return np.asarray(tokenizer.encode(text), np.int64)


def _entry(source: str, line: str, tokenizer: Tokenizer | None) -> np.ndarray:
    """The ids of one line of a .jsonl file."""
    try:
        value: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"calibration: {source} is no JSON ({error})") from error
    kinds = {"text", "tokens", "messages"} & value.keys() if isinstance(value, dict) else set()
    if len(kinds) != 1:
        raise RequestError(
            f"calibration: {source} holds {line[:60]!r}; accepted is an object with one of "
            '"text", "tokens" and "messages"'
        )
    (kind,) = kinds
    content = value[kind]
    if kind == "tokens":
        ids = np.asarray(content) if isinstance(content, list) else np.zeros((), np.float32)
        return ids if ids.size else np.zeros(0, np.int64)
    if kind == "messages" and tokenizer is not None:
        content = tokenizer.apply_chat_template(content, add_generation_prompt=False)
    if not isinstance(content, str) and tokenizer is not None:
        raise RequestError(f"calibration: {source} has a text that is no string")
    return _encode(source, content, tokenizer)


def _checked(path: Path, ids: np.ndarray, vocab_size: int) -> np.ndarray:
    if ids.dtype.kind not in "iu" or ids.ndim not in (1, 2):
        raise RequestError(
            f"calibration: {path} holds {ids.dtype}{list(ids.shape)}; accepted are integer token "
            "ids along one axis, or [N, T]"
        )
    if ids.size and not 0 <= ids.min() <= ids.max() < vocab_size:
        wrong = int(ids.min()) if ids.min() < 0 else int(ids.max())
        raise RequestError(
            f"calibration: {path} has the id {wrong}; the model knows 0 to {vocab_size - 1}. The "
            "tokenizer is not the model's: use the one of its folder"
        )
    return ids.reshape(-1).astype(np.int32)
