"""The calibration text of a run: tokens, and what identifies them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from qwen_jax.checkpoint.problems import show
from qwen_jax.config import QwenConfig
from qwen_jax.errors import RequestError
from qwen_jax.text import Tokenizer
from qwen_jax.text.folder import read_tokenizer

from ..calibration_text import read_calibration

WINDOWS = 128
WINDOW = 512


@dataclass(frozen=True)
class Calibration:
    """Windows of tokens.

    Attributes:
        tokens: int32 [N, T].
        files: where they come from, in order; of a chat template of its own, that too.
        fit_steps: of the fit of each layer's codes to its output; 0 for none.
    """

    tokens: np.ndarray
    files: tuple[Path, ...]
    fit_steps: int = 0

    def to_json(self) -> dict[str, Any]:
        """For the report, and to tell this calibration from another."""
        windows, window = self.tokens.shape
        return {
            "files": [
                {"name": show(file.name), "bytes": file.stat().st_size, "sha256": _digest(file)}
                for file in self.files
            ],
            "windows": windows,
            "window": window,
            "fit_steps": self.fit_steps,
            "tokens_sha256": hashlib.sha256(self.tokens.astype("<i4").tobytes()).hexdigest(),
        }


def prepare_calibration(
    files: Sequence[Path],
    folder: Path,
    config: QwenConfig,
    *,
    windows: int = WINDOWS,
    window: int = WINDOW,
    chat_template: Path | None = None,
    fit_steps: int = 0,
) -> Calibration:
    """Reads calibration text with the tokenizer of a model folder.

    Args:
        files: see `read_calibration`.
        folder: the model's.
        config: of the model.
        windows: most windows.
        window: tokens of one.
        chat_template: a Jinja file in place of the model's own template.
        fit_steps: see `Calibration`.

    Raises:
        RequestError: what `read_calibration` refuses, a number below 1, a window beyond the
            model's context, a fit with fewer than two windows, or a template that cannot be read.
        CheckpointError: the tokenizer's files are damaged.
    """
    refuse_windows(windows, window, config.max_position_embeddings)
    tokenizer = _tokenizer(folder, chat_template)
    sizes: dict[str, Any] = {"window": window, "windows": windows}
    chats = chat_template is not None
    tokens = read_calibration(files, tokenizer, config.vocab_size, **sizes, chats=chats)
    beside = () if chat_template is None else (chat_template,)
    if fit_steps < 0 or (fit_steps and len(tokens) < 2):
        raise RequestError(
            f"a fit of {fit_steps} steps with {len(tokens)} windows of calibration text; accepted "
            "are 0 steps or more, and two windows at least, of which one is held out: give more "
            "text, or leave --fit-steps out"
        )
    return Calibration(tokens, (*files, *beside), fit_steps)


def refuse_windows(windows: int, window: int, limit: int) -> None:
    """Raise `RequestError` for no windows, or windows of no token or beyond the context."""
    if windows < 1 or not 1 <= window <= limit:
        raise RequestError(
            f"calibration of {windows} windows of {window} tokens; accepted are at least one "
            f"window, and 1 to {limit} tokens, the model's context"
        )


def _tokenizer(folder: Path, chat_template: Path | None) -> Tokenizer | None:
    files = read_tokenizer(folder)
    if files is None:
        return None
    templates = dict(files.chat_templates)
    if chat_template is not None:
        try:
            templates["default"] = chat_template.read_text(encoding="utf-8")
        except (OSError, UnicodeError) as error:
            raise RequestError(f"chat template {show(chat_template)}: {error}") from error
    return Tokenizer(files.backend, special_tokens=files.special_tokens, chat_templates=templates)


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
