"""`qwen-jax inspect`: figures of shapes and folders, without weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from qwen_jax.cli.console import scaled
from qwen_jax.cli.shape import parse_size
from qwen_jax.config import QwenConfig
from qwen_jax.errors import RequestError
from tests.qwen_jax.coded_folder import arrays_of, coded_model, scheme_from, write_coded


def inspected(run, *arguments: str) -> dict:
    outcome = run("inspect", *arguments, "--json")
    assert (outcome.code, outcome.err) == (0, "")
    return json.loads(outcome.out)


@pytest.fixture
def copy(tiny, tmp_path) -> Path:
    return Path(shutil.copytree(tiny, tmp_path / "copy"))


def test_preset(run):
    report = inspected(run, "Qwen3.6-35B-A3B", "--memory", "80GB", "--batch-size", "4")
    cost = report["cost"]
    assert cost["parameters"]["total"] == 34_660_610_688
    assert cost["parameters"]["active"] == 2_946_429_568
    assert cost["kv_bytes_per_token"] == 20_480
    assert cost["state_bytes_per_sequence"] == {"delta": 62_914_560, "conv": 1_966_080}
    assert cost["layer_kinds"] == {"linear_attention + moe": 30, "full_attention + moe": 10}
    assert report["fit"]["batch_size"] == 4
    assert report["folder"] is None
    assert QwenConfig.from_hf(report["config"]) == QwenConfig.preset("qwen3.6-35b-a3b")


def test_text_says_the_same(run):
    outcome = run("inspect", "qwen3.6-35b-a3b", "--memory", "80GB")
    assert (outcome.code, outcome.err) == (0, "")
    for figure in ("34,660,610,688", "2,946,429,568", "20,480 B", "62,914,560", "518,144 tokens"):
        assert figure in outcome.out


def test_memory_too_small_for_the_weights(run):
    outcome = run("inspect", "qwen3.6-35b-a3b", "--memory", "24GB")
    assert "24.0 GB do not hold the weights (69.3 GB)" in outcome.out


def test_a_recipe_changes_the_bytes(run):
    report = inspected(run, "qwen3.6-35b-a3b", "--recipe", "q3", "--memory", "24GB")
    cost = report["cost"]
    assert (cost["recipe"], cost["bits"]) == ("q3", 3)
    # 40 layers of 256 experts with three matrices 2048 x 512, of 3.25 bits.
    experts = 40 * 256 * 3 * 2048 * 512 * 3.25 / 8
    assert experts < cost["weight_bytes"] < experts + 1.7e9
    assert cost["formats"]["3 bits, groups of 64"] == 80
    assert report["fit"]["context"] > 262_144
    outcome = run("inspect", "demo", "--recipe", "q3")
    assert outcome.code == 2 and "--dry-run" in outcome.err


def test_a_folder_in_codes(run, tmp_path):
    model = coded_model()
    arrays = arrays_of(model)
    folder = write_coded(tmp_path / "codes", arrays, scheme_from(model))
    report = inspected(run, str(folder))
    assert report["cost"]["recipe"] == "mine"
    assert report["cost"]["weight_bytes"] == report["folder"]["bytes"]
    assert report["cost"]["formats"]["4 bits, groups of 32, zero points"] == 1
    assert report["folder"]["quantised"] is None
    text = run("inspect", str(folder)).out
    assert "1 matrices of 3 bits, groups of 32" in text
    assert "recipe mine" in text


def test_dtype_changes_the_bytes(run):
    wide = inspected(run, "qwen3.6-35b-a3b", "--dtype", "float32")["cost"]
    assert wide["kv_bytes_per_token"] == 40_960
    assert wide["weight_bytes"] == 4 * 34_660_610_688


def test_int8_halves_the_bytes_of_keys_and_values(run):
    report = inspected(run, "qwen3.6-35b-a3b", "--kv-cache-dtype", "int8", "--memory", "80GB")
    assert report["cost"]["kv_bytes_per_token"] == 10_560
    assert report["fit"]["context"] > 1.9 * 518_144
    text = run("inspect", "qwen3.6-35b-a3b", "--kv-cache-dtype", "int8").out
    assert "10,560 B a token in int8" in text


def test_folder(run, tiny):
    report = inspected(run, tiny)
    assert report["folder"] == {
        "path": tiny,
        "files": 1,
        "tensors": 13,
        "bytes": report["cost"]["weight_bytes"],
        "dtypes": {"F32": 13},
        "quantised": None,
        "notes": [],
        "skipped": {},
    }
    assert "13 x F32" in run("inspect", tiny).out


def test_demo(run):
    assert inspected(run, "demo")["cost"]["parameters"]["total"] == 4_081_456


def test_skipped_tensors_and_stray_files_are_told(run, copy):
    arrays = load_file(copy / "model.safetensors")
    arrays["mtp.fc.weight"] = arrays["model.norm.weight"].copy()
    save_file(arrays, copy / "model.safetensors")
    save_file({"a": np.zeros(1)}, copy / "stray.safetensors")
    report = inspected(run, str(copy))["folder"]
    assert report["skipped"] == {"mtp": 1}
    assert any("stray.safetensors" in note for note in report["notes"])
    assert "skipped 1 mtp tensors" in run("inspect", str(copy)).out


def test_quantised_folder_is_named_and_its_configuration_shown(run, copy):
    config = json.loads((copy / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (copy / "config.json").write_text(json.dumps(config))
    report = inspected(run, str(copy))
    assert report["folder"]["quantised"] == "GPTQ"
    assert report["config"]["hidden_size"] == 32
    assert "GPTQ: such weights cannot be run yet" in run("inspect", str(copy)).out


def test_folder_without_weights_is_shown_with_the_reason(run, copy):
    (copy / "model.safetensors").unlink()
    report = inspected(run, str(copy))
    assert "holds no *.safetensors" in report["folder"]["weights"]
    (copy / "pytorch_model.bin").write_bytes(b"")
    assert "PyTorch pickle" in run("inspect", str(copy)).out


def test_damaged_weights_are_a_failure(run, copy):
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    outcome = run("inspect", str(copy))
    assert (outcome.code, outcome.out) == (1, "")
    assert "model.safetensors" in outcome.err


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("24GB", 24 * 10**9),
        ("24gb", 24 * 10**9),
        ("24 GiB", 24 * 2**30),
        ("22.5GiB", int(22.5 * 2**30)),
        ("800MB", 8 * 10**8),
        ("1TB", 10**12),
        ("3kB", 3000),
        ("512B", 512),
        ("123456", 123456),
    ],
)
def test_amounts_of_memory(text, expected):
    assert parse_size(text, "--memory") == expected


@pytest.mark.parametrize(
    "text",
    ["", "9" * 400, "GB", "-1GB", "1e9", "24 GBs", "nan", "0", "0GB", "1.5.2GB", "٣GB", "24i"],
)
def test_other_amounts_are_refused(run, text):
    with pytest.raises(RequestError, match="24GB"):
        parse_size(text, "--memory")
    outcome = run("inspect", "demo", f"--memory={text}")
    assert (outcome.code, outcome.out) == (2, "")


def test_batch_size_below_one_is_refused(run):
    outcome = run("inspect", "demo", "--batch-size", "0")
    assert (outcome.code, outcome.out) == (2, "")
    assert "--batch-size is 0" in outcome.err


def test_large_numbers_have_prefixes():
    values = {0: "0 B", 999: "999 B", 20_480: "20.5 kB", 69.3e9: "69.3 GB", 2e12: "2.0 TB"}
    assert {value: scaled(value, "B") for value in values} == values
    assert scaled(1e15, "B") == "1,000.0 TB"
