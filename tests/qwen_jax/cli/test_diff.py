"""`diff` as a person uses it: what it prints and returns."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from tests.convert.sources import PER_EXPERT, tensors, write

USAGE = 2


def test_equal_folders(run, tmp_path):
    arrays = tensors(PER_EXPERT, 1) | {"model.visual.norm.weight": np.ones(3, np.float32)}
    source = write(tmp_path / "source", arrays, shards=2, mtp_num_hidden_layers=1)
    native = write(tmp_path / "native", tensors(mtp=1), mtp_num_hidden_layers=1)
    outcome = run("diff", str(source), str(native))
    count = len(tensors(mtp=1))
    assert outcome == (
        0,
        "not compared: 1 visual tensors of the first\n"
        f"equal: {count} of {count} tensors in both are the same bit for bit\n",
        "",
    )
    report = json.loads(run("diff", str(source), str(native), "--json").out)
    assert report["equal"] is True
    assert (report["compared"], report["tensors"], report["config"]) == (count, [], {})
    assert report["left_out"] == [{"visual": 1}, {}]


def test_different_folders(run, tmp_path):
    arrays = tensors()
    first = write(tmp_path / "first", arrays)
    changed = {key: array.copy() for key, array in arrays.items()}
    changed["model.norm.weight"][[1, 5]] = np.array([3, -8], ml_dtypes.bfloat16)
    arrays["model.norm.weight"][[1, 5]] = np.array([2, -8], ml_dtypes.bfloat16)
    changed["model.layers.0.mlp.gate.weight"][0, 0] = np.nan
    changed["lm_head.weight"] = changed["lm_head.weight"].astype(np.float32)
    del changed["model.layers.1.self_attn.q_norm.weight"]
    save_file(arrays, first / "model.safetensors")
    second = write(
        tmp_path / "second",
        changed | {"model.layers.1.self_attn.q_norm.weight": np.zeros(8, ml_dtypes.bfloat16)},
        rms_norm_eps=1e-5,
    )
    outcome = run("diff", str(first), str(second))
    assert (outcome.code, outcome.err) == (1, "")
    lines = outcome.out.splitlines()
    assert lines[0] == "config rms_norm_eps: 1e-06 and 1e-05"
    assert "norm.weight: 1 values differ, by at most 1 (0.333 relative)" in lines
    assert "layers.0.mlp.gate.weight: 1 values differ, by at most inf (inf relative)" in lines
    assert "lm_head.weight: 0 values differ, by at most 0 (0 relative), bfloat16 and float32" in (
        lines
    )
    assert lines[
        -1
    ] == f"different: {len(arrays) - 4} of {len(arrays)} tensors in both are the " + (
        "same bit for bit"
    )
    report = json.loads(run("diff", str(first), str(second), "--json").out)
    assert report["equal"] is False
    assert report["config"] == {"rms_norm_eps": [1e-6, 1e-5]}
    by_path = {tensor["path"]: tensor for tensor in report["tensors"]}
    assert by_path["norm.weight"]["max_abs"] == 1
    assert by_path["layers.0.mlp.gate.weight"]["max_abs"] is None  # infinite: not a JSON number
    assert by_path["layers.1.self_attn.q_norm.weight"]["count"] == 8


def test_folders_of_other_shapes(run, tmp_path):
    first = write(tmp_path / "first")
    second = write(tmp_path / "second", tensors(mtp=1, vocab_size=25), vocab_size=25)
    lines = run("diff", str(first), str(second)).out.splitlines()
    assert "config vocab_size: 24 and 25" in lines
    assert "embed_tokens.weight: shape (24, 16) and (25, 16)" in lines
    assert "mtp.fc.weight: only in the second" in lines


def test_folder_that_cannot_be_compared(run, tmp_path):
    outcome = run("diff", str(write(tmp_path / "source")), str(tmp_path / "nowhere"))
    assert (outcome.code, outcome.out) == (USAGE, "")
    assert "nowhere does not exist" in outcome.err
