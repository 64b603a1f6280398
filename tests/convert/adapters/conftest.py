"""Adapter folders: those of the golden file, and hand-made ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from safetensors.numpy import save_file

from convert.adapters import load_adapter
from qwen_jax.checkpoint.mapping import Layout
from qwen_jax.checkpoint.tensors import stored_tensors, tree_tensors
from qwen_jax.config import QwenConfig
from qwen_jax.errors import CheckpointError
from tests.golden.weights import FOLDER, make_weight

Arrays = dict[str, np.ndarray]

# As the library that made a case names and groups the tensors of its model.
LAYOUTS = {
    "qwen3_moe_per_expert": Layout(experts="per_expert"),
    "qwen3_next": Layout(linear_projections="interleaved"),
    "qwen3_next_saved": Layout(linear_projections="interleaved"),
    "qwen3_5_moe": Layout("model.language_model."),
}
PLAIN = {"peft_type": "LORA", "r": 2, "lora_alpha": 4}


class Golden(NamedTuple):
    """A golden case: its model, the adapter, and tree tensors before and after merging."""

    config: QwenConfig
    settings: dict[str, Any]
    tensors: Arrays
    before: Arrays
    after: Arrays
    changed: set[str]


@pytest.fixture(scope="session")
def golden() -> Callable[[str], Golden]:
    cases = json.loads((FOLDER / "adapters.json").read_text())
    with np.load(FOLDER / "adapters.npz") as arrays:
        values = dict(arrays)

    def make(name: str) -> Golden:
        case = cases[name]
        config = QwenConfig.from_hf(case["config"])
        adapter, merged = (
            {k.split("|")[2]: v for k, v in values.items() if k.startswith(f"{name}|{part}|")}
            for part in ("adapter", "merged")
        )
        tree = {path: tensor.shape for path, tensor in tree_tensors(config).items()}
        before, after = ({path: np.zeros(tree[path], np.float32) for path in tree} for _ in "ab")
        changed = set()
        stored = stored_tensors(config, LAYOUTS.get(name, Layout()))
        for key, tensor in stored.items():
            old = make_weight(key, tensor.shape, stored="float32")
            for piece in tensor.pieces:
                piece.gather(before[piece.path], old)
                piece.gather(after[piece.path], merged.get(key, old))
                changed |= {piece.path} if key in merged else set()
        assert {key for key in merged if "visual" not in key} <= stored.keys()
        return Golden(config, case["adapter_config"], adapter, before, after, changed)

    return make


@pytest.fixture
def write_adapter(tmp_path: Path) -> Callable[..., Path]:
    """Writes an adapter folder."""

    def write(
        tensors: Mapping[str, np.ndarray], settings: Any = PLAIN, name: str = "adapter"
    ) -> Path:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        (folder / "adapter_config.json").write_text(json.dumps(settings))
        arrays = {key: np.ascontiguousarray(value) for key, value in tensors.items()}
        save_file(arrays, folder / "adapter_model.safetensors")
        return folder

    return write


@pytest.fixture
def refused(write_adapter: Callable[..., Path]) -> Callable[..., str]:
    """Gives the message with which an adapter is refused."""

    def message(config: QwenConfig, tensors: Arrays, **settings: Any) -> str:
        with pytest.raises(CheckpointError) as caught:
            load_adapter(write_adapter(tensors, PLAIN | settings), config)
        return str(caught.value)

    return message
