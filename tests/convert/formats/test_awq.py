"""AWQ matrices in the gemm layout, packed here code by code."""

from __future__ import annotations

import numpy as np
import pytest


def config(group: int = 32, **more) -> dict:
    return {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm"} | more


def matrix(outputs: int, inputs: int, group: int):
    """Random codes [O, I], zero points and float16 scales [O, G], and the group of each input."""
    rng = np.random.default_rng(outputs)
    index = np.arange(inputs) // group
    codes = rng.integers(0, 16, (outputs, inputs))
    zeros = rng.integers(0, 16, (outputs, index[-1] + 1))
    return codes, zeros, rng.uniform(0.001, 0.02, zeros.shape).astype(np.float16), index


def keyed(parts: dict) -> dict:
    return {f"w.{leaf}": array for leaf, array in parts.items()}


@pytest.mark.parametrize(
    ("outputs", "inputs", "group"), [(64, 96, 32), (8, 5, -1), (40, 70, 32), (16, 128, 128)]
)
def test_gemm_layout(opened, packing, bits_of, outputs, inputs, group):
    made = matrix(outputs, inputs, inputs if group == -1 else group)
    folder = opened(keyed(packing.awq(*made[:3])), config(group))
    whole = packing.product(*made)
    assert folder.tensors["w.weight"].shape == (outputs, inputs)
    assert folder.format_counts == {"AWQ int4": 1}
    np.testing.assert_array_equal(bits_of(folder.read("w.weight")), whole)
    for start, stop in [(0, 1), (3, 7), (5, outputs), (outputs - 1, outputs)]:
        rows = slice(start, stop)
        np.testing.assert_array_equal(bits_of(folder.read("w.weight", rows)), whole[rows])


def test_older_spelling_in_a_file_of_its_own(write, packing, bits_of):
    import json

    from convert.logical import open_logical

    made = matrix(16, 64, 32)
    folder = write(keyed(packing.awq(*made[:3])))
    old = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}
    (folder / "quant_config.json").write_text(json.dumps(old))
    values = open_logical(folder).read("w.weight")
    np.testing.assert_array_equal(bits_of(values), packing.product(*made))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("version", "gemv"),
        ("version", "gemv_fast"),
        ("version", "marlin"),
        ("version", "exllama"),
        ("backend", "llm-awq"),
        ("bits", 3),
        ("group_size", 0),
        ("desc_act", True),
    ],
)
def test_other_layouts_are_refused(refusal, packing, field, value):
    text = refusal(keyed(packing.awq(*matrix(16, 64, 32)[:3])), config() | {field: value})
    assert f"config.json: quantization_config.{field} is" in text
    assert "accepted: " in text


def test_parts_that_do_not_fit_are_refused(refusal, packing):
    parts = packing.awq(*matrix(16, 64, 32)[:3])
    wrong = np.zeros((3, 2), np.int32)
    assert "w.qzeros has shape [3, 2]; expected [2, 2]" in refusal(
        keyed(parts | {"qzeros": wrong}), config()
    )
    assert "in the gemm layout of AWQ a column of qweight holds eight" in refusal(
        keyed(parts | {"qweight": np.zeros((64, 16), np.int32)}), config()
    )
    assert "has 2 groups of scales for 64 inputs" in refusal(keyed(parts), config(16))
    assert "is there in two forms" in refusal(
        keyed(parts | {"g_idx": np.zeros(64, np.int32)}), config()
    )
    assert "but no qzeros" in refusal(
        {key: array for key, array in keyed(parts).items() if "qzeros" not in key}, config()
    )
