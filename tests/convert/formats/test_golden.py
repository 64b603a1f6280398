"""Matrices that public libraries quantised and packed; see tests/golden/make_quantised.py."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

GOLDEN = Path(__file__).parents[2] / "golden"
CASES = json.loads((GOLDEN / "quantised.json").read_text())
DTYPES = {
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "I8": np.int8,
    "I32": np.int32,
    "I64": np.int64,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F32": np.float32,
}


@pytest.fixture(scope="module")
def arrays() -> dict[str, np.ndarray]:
    with np.load(GOLDEN / "quantised.npz") as stored:
        return dict(stored)


@pytest.mark.parametrize("name", CASES)
def test_library_and_reader_agree_bit_for_bit(opened, bits_of, arrays, name):
    case = CASES[name]
    tensors = {
        key: arrays[f"{name}/{key}"].view(DTYPES[dtype]) for key, dtype in case["tensors"].items()
    }
    expected = arrays[f"{name} expected"]
    folder = opened(tensors, case["config"])
    assert list(folder.tensors) == [case["key"]]
    assert folder.tensors[case["key"]].shape == expected.shape
    assert sorted(folder.parts[case["key"]]) == sorted(tensors)
    np.testing.assert_array_equal(bits_of(folder.read(case["key"])), expected)
    middle = slice(1, len(expected) - 1)
    np.testing.assert_array_equal(bits_of(folder.read(case["key"], middle)), expected[middle])


def test_every_kind_of_zero_point_is_covered(arrays):
    """Stored fields of all ones are in the version 1 samples that a library has read."""
    for name, bits in [("gptqmodel_2", 2), ("gptqmodel_3", 3), ("gptqmodel_4", 4)]:
        words = arrays[f"{name}/model.layers.0.mlp.down_proj.qzeros"]
        stream = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
        fields = stream.reshape(len(words), -1, bits)
        assert fields.all(axis=2).any()
        assert (~fields.any(axis=2)).any()
