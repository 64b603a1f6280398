"""The folder that shows quantised tensors as plain ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from convert.logical import LogicalFolder, open_logical
from qwen_jax.checkpoint.safetensors_io import TensorFolder, open_folder
from qwen_jax.errors import CheckpointError

BF16 = ml_dtypes.bfloat16
FP8 = {"quant_method": "fp8", "weight_block_size": [4, 4]}


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    def write(config: dict[str, Any], **shards: dict[str, np.ndarray]) -> Path:
        placed = {}
        for shard, arrays in shards.items():
            save_file(arrays, tmp_path / f"{shard}.safetensors")
            placed |= dict.fromkeys(arrays, f"{shard}.safetensors")
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
        (tmp_path / "config.json").write_text(json.dumps(config))
        return tmp_path

    return write


@pytest.fixture
def quantised(folder: Callable[..., Path]) -> LogicalFolder:
    """One FP8 matrix whose scales are in another shard, its bias, and a plain tensor."""
    codes = np.full((6, 8), 0x38, np.uint8).view(ml_dtypes.float8_e4m3fn)  # 1.0
    scales = np.arange(1, 5, dtype=np.float32).reshape(2, 2)
    first = {"norm.weight": np.arange(4, dtype=np.float32), "w.weight": codes}
    second = {"w.weight_scale_inv": scales, "w.bias": np.zeros(6, BF16)}
    return open_logical(folder({"quantization_config": FP8}, first=first, second=second))


def test_quantised_matrix_looks_plain(quantised):
    assert sorted(quantised.tensors) == ["norm.weight", "w.bias", "w.weight"]
    info = quantised.tensors["w.weight"]
    stored = open_folder(quantised.path).tensors["w.weight"]
    assert (info.name, info.dtype, info.shape) == ("w.weight", "BF16", (6, 8))
    assert (info.shard, info.start, info.stop) == ("first.safetensors", stored.start, stored.stop)
    assert quantised.parts == {"w.weight": ("w.weight", "w.weight_scale_inv")}
    assert quantised.shards == ("first.safetensors", "second.safetensors")
    assert quantised.dequantises
    assert isinstance(quantised, TensorFolder)


def test_bytes_are_those_in_the_files(quantised):
    assert quantised.physical_bytes("w.weight") == 6 * 8 + 4 * 4
    assert quantised.physical_bytes("norm.weight") == 16
    assert quantised.nbytes == 6 * 8 + 4 * 4 + 16 + 12
    assert quantised.nbytes == open_folder(quantised.path).nbytes


def test_rows_are_read_alone(quantised):
    expected = np.repeat([[1, 2], [3, 4]], 4, axis=0).repeat(4, axis=1)[:6].astype(BF16)
    for rows in (slice(None), slice(2, 5), slice(5, 99), slice(-2, None), slice(4, 4), slice(5, 2)):
        values = quantised.read("w.weight", rows)
        assert values.dtype == BF16
        np.testing.assert_array_equal(values, expected[rows])
    np.testing.assert_array_equal(quantised.read("norm.weight", slice(1, 3)), [1, 2])
    assert not quantised.read("norm.weight").flags.writeable
    with pytest.raises(CheckpointError, match=r"no tensor w\.scale"):
        quantised.read("w.scale")


def test_parts_are_not_tensors(quantised):
    with pytest.raises(CheckpointError, match="holds no tensor"):
        LogicalFolder.read(quantised, "w.none")
    assert "w.weight_scale_inv" not in quantised.tensors


def test_zero_biases_next_to_quantised_matrices(quantised, folder):
    assert quantised.zero_biases() == {"w.bias"}
    codes = np.zeros((4, 4), ml_dtypes.float8_e4m3fn)
    scale = np.ones((1, 1), np.float32)
    arrays = {
        "a.weight": codes,
        "a.weight_scale_inv": scale,
        "a.bias": np.float16([0, 0, 1, 0]),
        "b.weight": np.ones((4, 4), np.float16),
        "b.bias": np.zeros(4, np.float16),
        "c.weight": codes,
        "c.weight_scale_inv": scale,
        "experts.down_proj": codes[None],
        "experts.down_proj_scale_inv": scale[None],
    }
    assert open_logical(folder({"quantization_config": FP8}, only=arrays)).zero_biases() == set()


def test_plain_folder_passes_through(folder):
    arrays = {"a.weight": np.ones((2, 3), BF16), "b": np.array(7, np.float32)}
    opened = open_logical(folder({}, only=arrays))
    plain = open_folder(opened.path)
    assert dict(opened.tensors) == dict(plain.tensors)
    assert (opened.nbytes, opened.notes, opened.shards) == (plain.nbytes, (), plain.shards)
    assert not opened.parts and not opened.format_counts and not opened.skipped
    assert opened.read("b") == 7


def test_all_faults_are_in_one_error(folder):
    lonely = np.ones((4, 4), ml_dtypes.float8_e4m3fn)
    arrays = {"a.weight": lonely, "b.weight_scale_inv": np.ones((1, 1), np.float32)}
    path = folder({"quantization_config": FP8 | {"odd": 1, "fmt": "e5m2"}}, only=arrays)
    with pytest.raises(CheckpointError) as caught:
        open_logical(path)
    text = str(caught.value)
    for expected in (
        f"{path} holds quantised weights that cannot be read",
        "quantization_config.odd: 1",
        'quantization_config.fmt is "e5m2"',
        "a.weight is F8_E4M3",
        "b.weight has scale_inv, but no weight",
        "of one release",
    ):
        assert expected in text


def test_faults_of_the_folder_itself_come_first(tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        open_logical(tmp_path / "none")
