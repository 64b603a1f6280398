"""Calibration tokens: windows of text files, token files and chats."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from qwen_jax.text import Tokenizer


def read_calibration(
    paths: Sequence[Path],
    tokenizer: Tokenizer | None,
    vocab_size: int,
    *,
    window: int = 512,
    windows: int = 128,
    seed: int = 0,
) -> np.ndarray:
    """Windows of tokens from files, spread evenly over all their text.

    Accepted are .txt and .txt.xz (text), .npy (token ids, one axis or [N, T]), and .jsonl with one
    object a line: {"text": ...}, {"tokens": [...]} or {"messages": [...]}; messages go through the
    model's chat template.

    Args:
        paths: files, in any mixture.
        tokenizer: the model's; None where the folder has none, then only token files are accepted.
        vocab_size: rows of the embedding.
        window: tokens of a window, T.
        windows: most windows to use; fewer where there is less text.
        seed: which ones are used.

    Returns:
        int32 [N, T].

    Raises:
        RequestError: a file is missing, of another kind, malformed, has ids outside the vocabulary,
            or text without a tokenizer; or all together are shorter than one window.
    """
    raise NotImplementedError
