"""Model folders so small that a conversion takes milliseconds, and commands that convert them."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from qwen_jax.checkpoint.mapping import Layout
from qwen_jax.checkpoint.tensors import stored_tensors, tree_tensors
from qwen_jax.cli import main
from qwen_jax.config import QwenConfig

Arrays = dict[str, np.ndarray]

BF16 = np.dtype(ml_dtypes.bfloat16)
INDEX = "model.safetensors.index.json"

# A layer of either kind, experts in both.
FIELDS = {
    "model_type": "qwen3_5_moe_text",
    "vocab_size": 24,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
PLAIN = Layout()
PER_EXPERT = Layout(experts="per_expert", mtp_experts="per_expert")


def tensors(layout: Layout = PLAIN, mtp: int = 0, **changes: Any) -> Arrays:
    """Random tensors of the model under the keys of a layout: the same tree in every layout."""
    config = QwenConfig.from_hf(FIELDS | changes)
    tree = {}
    for path, shape in tree_tensors(config, mtp).items():
        rng = np.random.default_rng(list(path.encode()))
        tree[path] = rng.normal(0, 0.2, shape.shape).astype(BF16)
    stored = {}
    for key, tensor in stored_tensors(config, layout, mtp).items():
        stored[key] = np.zeros(tensor.shape, BF16)
        for piece in tensor.pieces:
            piece.scatter(stored[key], tree[piece.path])
    return stored


def write(folder: Path, arrays: Arrays | None = None, *, shards: int = 1, **fields: Any) -> Path:
    """Writes a folder; fields are added to those of its config.json, or put in their place."""
    folder.mkdir(parents=True)
    arrays = tensors() if arrays is None else arrays
    arrays = {key: np.array(array, order="C") for key, array in arrays.items()}
    (folder / "config.json").write_text(json.dumps(FIELDS | fields))
    if shards == 1:
        save_file(arrays, folder / "model.safetensors")
        return folder
    placed = {}
    for number in range(shards):
        name = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        part = {key: arrays[key] for key in sorted(arrays)[number::shards]}
        save_file(part, folder / name)
        placed |= dict.fromkeys(part, name)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    return folder


def add_tensor(folder: Path, key: str, dtype: str, shape: list[int], nbytes: int) -> None:
    """Adds zeros of a dtype that NumPy may lack to model.safetensors."""
    file = folder / "model.safetensors"
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    offsets = [len(data), len(data) + nbytes]
    header[key] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data + bytes(nbytes))


def read(folder: Path) -> Arrays:
    """All tensors of a folder, by safetensors' own reader."""
    found: Arrays = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def bits(arrays: Mapping[str, np.ndarray]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Dtype, shape and bytes of each array, to compare."""
    return {key: (str(a.dtype), a.shape, a.tobytes()) for key, a in arrays.items()}


class Outcome(NamedTuple):
    """What a command did."""

    code: int
    out: str
    err: str


class Shell:
    """Runs commands in this process, and looks at what they leave in a folder.

    Args:
        capsys: takes their output.
        place: the folder.
    """

    def __init__(self, capsys: pytest.CaptureFixture[str], place: Path) -> None:
        self._capsys = capsys
        self.place = place

    def run(self, *arguments: object) -> Outcome:
        """Runs a command."""
        self._capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        return Outcome(code, *self._capsys.readouterr())

    def convert(self, source: Path, *arguments: object, name: str = "native") -> Path:
        """Converts a folder, which must succeed; returns the new one."""
        destination = self.place / name
        outcome = self.run("convert", source, destination, "--quiet", *arguments)
        assert outcome.code == 0, outcome.err
        return destination

    def refused(self, source: Path, *words: str, verb: str = "convert", options: tuple = ()) -> str:
        """Converts a folder, which must be refused with these words, leaving nothing behind."""
        destination = self.place / "refused"
        outcome = self.run(verb, source, destination, "--quiet", *options)
        assert (outcome.code, outcome.out) == (1, ""), outcome
        lines = outcome.err.splitlines()
        assert [line for line in lines if line.startswith("error: ")] == lines[:1]
        assert [word for word in words if word not in outcome.err] == []
        assert list(self.place.glob("refused*")) == []
        return outcome.err
