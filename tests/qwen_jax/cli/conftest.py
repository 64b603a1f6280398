"""The command line run inside the test process, and folders small enough to compile at once."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from safetensors.numpy import save_file

from qwen_jax.checkpoint.mapping import Layout
from qwen_jax.checkpoint.tensors import stored_tensors
from qwen_jax.cli import main
from qwen_jax.config import QwenConfig

TINY = {
    "model_type": "qwen3",
    "vocab_size": 4096,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 32,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "dtype": "float32",
    "rope_theta": 10000.0,
    "bos_token_id": None,
    "eos_token_id": 4089,
}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


class Outcome(NamedTuple):
    """What a command did."""

    code: int
    out: str
    err: str


@pytest.fixture
def run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Outcome]:
    """Runs a command with bytes as its standard input."""

    def run(*arguments: str, stdin: bytes = b"") -> Outcome:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin), "utf-8"))
        capsys.readouterr()
        code = main(arguments)
        return Outcome(code, *capsys.readouterr())

    return run


@pytest.fixture(scope="session")
def write_tiny(demo_path: Path) -> Callable[..., Path]:
    """Writes a folder with a random model of one layer and the demo's tokenizer.

    Args: the folder, fields of its config.json to change, and whether it has a tokenizer.
    """

    def write(folder: Path, *, tokenizer: bool = True, **changes: Any) -> Path:
        folder.mkdir(exist_ok=True)
        fields = TINY | changes
        (folder / "config.json").write_text(json.dumps(fields))
        rng = np.random.default_rng(0)
        shapes = stored_tensors(QwenConfig.from_hf(fields), Layout())
        arrays = {key: rng.normal(0, 0.1, tensor.shape) for key, tensor in shapes.items()}
        save_file(
            {k: v.astype(np.float32) for k, v in arrays.items()}, folder / "model.safetensors"
        )
        if tokenizer:
            for name in TOKENIZER_FILES:
                shutil.copy(demo_path / name, folder)
        return folder

    return write


@pytest.fixture(scope="session")
def tiny(write_tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> str:
    """Path of a folder that must not be changed."""
    return str(write_tiny(tmp_path_factory.mktemp("models") / "tiny"))
