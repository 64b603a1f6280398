"""Tokens to add to the demo model."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from convert.vocabulary import Vocabulary, read_added_tokens
from qwen_jax.config import QwenConfig
from qwen_jax.errors import CheckpointError


@pytest.fixture(scope="session")
def demo_config(demo_path: Path) -> QwenConfig:
    return QwenConfig.from_hf(demo_path)


@pytest.fixture
def tokenizer_folder(demo_path: Path, tmp_path: Path) -> Path:
    """The demo's folder without weights, to be changed."""
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_path / name, folder)
    return folder


@pytest.fixture
def added(demo_path: Path, demo_config: QwenConfig, tmp_path: Path) -> Callable[..., Vocabulary]:
    """Reads entries, or the raw content of a file, for the demo or another folder."""

    def added(
        *entries: Any, raw: str | bytes | None = None, folder: Path = demo_path, **changes: Any
    ) -> Vocabulary:
        file = tmp_path / "tokens.json"
        raw = json.dumps(list(entries)) if raw is None else raw
        file.write_bytes(raw.encode() if isinstance(raw, str) else raw)
        return read_added_tokens(file, folder, dataclasses.replace(demo_config, **changes))

    return added


@pytest.fixture
def tokens_refused(added: Callable[..., Vocabulary]) -> Callable[..., str]:
    """Gives the message with which entries are refused."""

    def refused(*entries: Any, **options: Any) -> str:
        with pytest.raises(CheckpointError) as caught:
            added(*entries, **options)
        return str(caught.value)

    return refused
