"""Calibration tokens: windows of text files, token files and chats."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from qwen_jax.errors import RequestError
from qwen_jax.evaluate.texts import read_documents
from qwen_jax.text import Tokenizer


def read_calibration(
    paths: Sequence[Path],
    tokenizer: Tokenizer | None,
    vocab_size: int,
    *,
    window: int = 512,
    windows: int = 128,
    chats: bool = False,
) -> np.ndarray:
    """Windows of tokens from files, spread evenly over all that the files hold.

    Documents are joined in the given order before they are cut.

    Args:
        paths: files, as `read_documents` takes them.
        tokenizer: the model's; None where the folder has none, then only tokens are accepted.
        vocab_size: rows of the embedding.
        window: tokens of a window, T.
        windows: most windows to use; fewer where there is less text.
        chats: whether a template was given for chats, of which there must be one then.

    Returns:
        int32 [N, T].

    Raises:
        RequestError: what `read_documents` refuses; a tokenizer that is not the model's; a template
            for chats without any; or all files together are shorter than one window.
    """
    for name, value in (("window", window), ("windows", windows)):
        if value < 1:
            raise RequestError(f"{name} is {value}; accepted is 1 and more")
    if tokenizer is not None and tokenizer.vocab_size > vocab_size:
        raise RequestError(
            f"the tokenizer has ids up to {tokenizer.vocab_size - 1}, the model's embedding "
            f"{vocab_size} rows, so it is another model's; use the tokenizer files of the model's "
            "own release, or none and files of token ids (.npy)"
        )
    documents = [
        document for path in paths for document in read_documents(path, tokenizer, vocab_size)
    ]
    if chats and not any(document.is_chat for document in documents):
        raise RequestError(
            f"a chat template is given, and {', '.join(map(str, paths))} holds no chat, so it has "
            'no effect; give chats as lines {"messages": ...} of a .jsonl file, or no template'
        )
    tokens = np.concatenate([*(document.tokens for document in documents), np.zeros(0, np.int32)])
    if len(tokens) < window:
        raise RequestError(
            f"calibration: {', '.join(map(str, paths)) or 'no file'} holds {len(tokens)} tokens; a "
            f"window takes {window}. Give more text, or shorter windows"
        )
    count = min(windows, len(tokens) // window)
    starts = np.linspace(0, len(tokens) - window, count).astype(np.int64)
    return np.stack([tokens[start : start + window] for start in starts])
