"""Folders in codes without calibration text: what is in them, and what is refused."""

from __future__ import annotations

import fnmatch
import functools
import hashlib
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from convert.writing import verify_folder
from qwen_jax import load
from qwen_jax.checkpoint.checksums import QUANTIZATION
from qwen_jax.checkpoint.mapping import Layout
from qwen_jax.checkpoint.native import read_record
from qwen_jax.quant import QTensor
from tests.convert import sources
from tests.convert.quantization.models import RULES, recipe, source
from tests.convert.quantization.reading import dequantised
from tests.convert.sources import PER_EXPERT, Shell, bits, read, tensors

COMPOSITE = Layout("model.language_model.", experts="per_expert", mtp_experts="per_expert")


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Shell:
    return Shell(capsys, tmp_path)


def quantised(shell: Shell, folder: Path, *arguments: object, name: str = "codes") -> Path:
    """Quantises a folder, which must succeed; returns the new one."""
    rules = recipe(shell.place)
    outcome = shell.run("quantize", folder, shell.place / name, "-q", "--recipe", rules, *arguments)
    assert outcome.code == 0, outcome.err
    return shell.place / name


def rule_of(path: str) -> dict[str, Any] | None:
    return next((rule for rule in RULES if fnmatch.fnmatchcase(path, rule["pattern"])), None)


def test_a_whole_folder(shell):
    """Every tensor is there once; codes are near the weights, the rest is as it was."""
    folder = source(shell.place / "source", COMPOSITE, mtp=1)
    add_vision(folder)
    codes = quantised(shell, folder)
    found, report = read(codes), json.loads((codes / "quantization_report.json").read_text())
    scheme = json.loads((codes / "config.json").read_text())["quantization_config"]
    plain = {key: array for key, array in tensors(mtp=1, **fields_of(folder)).items()}
    coded, expected = set(), set()
    for key, weight in plain.items():
        path = key.removeprefix("model.")
        rule = rule_of(path)
        if rule is None:
            expected.add(key)
            assert bits({"": found[key]}) == bits({"": weight})
            continue
        coded.add(path)
        parts = ["codes", "scale"] + ["zero"] * (rule.get("symmetric") is False)
        expected.update(f"{key}.{part}" for part in parts)
        weight = weight.astype(np.float64)
        made = dequantised(found, key, weight.shape[-1], rule["group_size"])
        error = np.linalg.norm(made - weight) / np.linalg.norm(weight)
        # Of a normal distribution, 3 bits without clipping lose about 0.2 of the norm.
        assert error < {3: 0.2, 4: 0.1, 8: 0.006}[rule["bits"]], path
        assert report["tensors"][path]["weight_error"] == pytest.approx(error, rel=1e-3)
        assert scheme["tensors"][path] == {
            "bits": rule["bits"],
            "group_size": rule["group_size"],
            "symmetric": rule.get("symmetric", True),
            "input_scale": False,
        }
    assert found.keys() == expected
    assert scheme["tensors"].keys() == report["tensors"].keys() == coded
    assert {path for path in coded if path.startswith("mtp.")}
    assert {tensor["method"] for tensor in report["tensors"].values()} == {"round-to-nearest"}
    assert report["totals"]["tensors_in_codes"] == len(coded)
    assert report["totals"]["matrices_in_codes"] == sum(
        plain[key].shape[0] if plain[key].ndim == 3 else 1
        for key in plain
        if key.removeprefix("model.") in coded
    )
    record = read_record(codes)
    assert record is not None
    assert (record.recipe, record.skipped) == ("mine", {"visual": 1})
    assert verify_folder(codes, record.checksums, lambda nbytes: None) == []


def test_a_model_is_loaded_from_it(shell):
    """The arrays of a loaded model are the numbers of the files, none of them a copy in floats."""
    folder = source(shell.place / "source", mtp=1)
    (folder / "merges.txt").write_text("a b")
    codes = quantised(shell, folder)
    found, record = read(codes), read_record(codes)
    assert record is not None
    assert record.files["merges.txt"] == hashlib.sha256(b"a b").hexdigest()
    assert record.files.keys() == {"merges.txt", QUANTIZATION}
    model, _ = load(codes, bits=3)
    for path, key, inputs, group in (
        ("mlp.experts.down_proj", "model.layers.0.mlp.experts.down_proj", 32, 32),
        ("linear_attn.in_proj_qkv.weight", "model.layers.0.linear_attn.in_proj_qkv.weight", 80, 64),
    ):
        leaf = functools.reduce(getattr, path.split("."), model.layers[0])[...]
        assert isinstance(leaf, QTensor)
        expected = dequantised(found, key, inputs, group)
        np.testing.assert_allclose(leaf.dequantise(np.float32), expected, rtol=1e-6, atol=1e-9)


def fields_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def add_vision(folder: Path) -> None:
    sources.add_tensor(folder, "model.visual.norm.weight", "F32", [3], 12)


def test_the_dry_run_counts_to_the_byte(shell):
    folder = source(shell.place / "source", mtp=1)
    rules = recipe(shell.place)
    plan = json.loads(shell.run("quantize", folder, "--recipe", rules, "--dry-run", "--json").out)
    assert [path.name for path in shell.place.glob("codes*")] == []
    codes = quantised(shell, folder)
    arrays = read(codes)
    assert plan["tensor_bytes"] == sum(array.nbytes for array in arrays.values())
    assert plan["bytes_out"] == plan["tensor_bytes"]
    assert plan["tensors_out"] == len(arrays)
    shards = [path.stat().st_size for path in codes.glob("*.safetensors")]
    assert plan["file_bytes"] == sum(shards)
    assert plan["mtp_bytes"] == sum(a.nbytes for key, a in arrays.items() if key.startswith("mtp."))
    text = {key: a for key, a in tensors(**fields_of(folder)).items()}
    weights = sum(array.size for array in text.values())
    bits_each = 8 * (plan["tensor_bytes"] - plan["mtp_bytes"]) / weights
    assert plan["bits_per_text_weight"] == pytest.approx(bits_each, abs=1e-4)
    # Embedding, two layers, head, MTP head.
    assert len(shards) == 5
    shape = shell.place / "shape"
    shape.mkdir()
    (shape / "config.json").write_bytes((folder / "config.json").read_bytes())
    alone = json.loads(shell.run("quantize", shape, "--recipe", rules, "--dry-run", "--json").out)
    # The fixture stores in bfloat16 also what stays float32 in every model.
    assert alone["tensors_in_codes"] == plan["tensors_in_codes"]
    assert alone["tensor_bytes"] - plan["tensor_bytes"] == 2 * (2 + 2 + 32)


def test_layouts_and_shard_sizes_give_the_same_codes(shell):
    fused = quantised(shell, source(shell.place / "fused"), name="a")
    folder = source(shell.place / "experts", PER_EXPERT)
    single = quantised(shell, folder, "--max-shard-size", "2KiB", name="b")
    assert len(list(single.glob("*.safetensors"))) > 10
    assert bits(read(fused)) == bits(read(single))
    native = shell.convert(folder)
    assert bits(read(quantised(shell, native, name="c"))) == bits(read(fused))


def test_a_head_that_is_the_embedding(shell):
    fields = {"tie_word_embeddings": True}
    codes = quantised(shell, source(shell.place / "source", **fields))
    found = read(codes)
    assert "model.embed_tokens.weight.codes" in found
    assert not any(key.startswith("lm_head") for key in found)


def test_constant_and_zero_groups(shell):
    folder = source(shell.place / "source")
    arrays = read(folder)
    key = "model.layers.1.mlp.experts.gate_up_proj"
    arrays[key][0, :, :32] = 0
    arrays[key][1, 0] = 0.25
    arrays[key][2] = -1e4
    arrays[key][3, 0, 5] = 1e-38
    arrays[key][3, 1, :32] = np.linspace(-9e14, 9e14, 32)
    sources.save_file(arrays, folder / "model.safetensors")
    found = read(quantised(shell, folder))
    made = dequantised(found, key, 80, 32)
    assert np.isfinite(made).all()
    assert not np.abs(made[0, :, :32]).max() > 1e-20
    assert made[1, 0] == pytest.approx(0.25, rel=0.01)
    assert made[2] == pytest.approx(arrays[key][2].astype(np.float64), rel=0.01)
    # Half a step of eight levels, and what is clipped.
    assert np.abs(made[3, 1, :32] - np.linspace(-9e14, 9e14, 32)).max() < 0.2 * 9e14


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model.layers.1.mlp.experts.down_proj", np.nan),
        ("model.layers.0.linear_attn.in_proj_qkv.weight", np.inf),
        ("model.embed_tokens.weight", -np.inf),
        ("model.layers.0.mlp.gate.weight", np.nan),
        ("model.layers.1.mlp.experts.down_proj", 3e38),
        ("model.embed_tokens.weight", -2e15),
    ],
)
def test_weights_that_are_not_finite_or_too_large_are_named(shell, key, value):
    folder = source(shell.place / "source")
    arrays = read(folder)
    arrays[key].reshape(-1)[7] = value
    sources.save_file(arrays, folder / "model.safetensors")
    rules = recipe(shell.place)
    kinds = {np.isnan(value): "1 NaN", np.isinf(value): "1 infinite"}
    words = (key.removeprefix("model."), kinds.get(True, "1 beyond 1e+15"))
    shell.refused(folder, *words, verb="quantize", options=("--recipe", rules))


def test_codes_are_not_quantised_again(shell):
    codes = quantised(shell, source(shell.place / "source"))
    shell.refused(codes, "quantised already", "(recipe mine)", "made from", verb="quantize")


def test_another_format_is_dequantised_first(shell):
    """Weights that FP8 holds exactly give the codes that bfloat16 gives."""
    folder = source(shell.place / "source")
    arrays = read(folder)
    key = "model.layers.1.self_attn.q_proj.weight"
    narrow = arrays[key].astype(ml_dtypes.float8_e4m3fn)
    arrays[key] = narrow.astype(ml_dtypes.bfloat16)
    sources.save_file(arrays, folder / "model.safetensors")
    expected = bits(read(quantised(shell, folder, name="plain")))
    arrays |= {key: narrow, f"{key}_scale_inv": np.ones((1, 1), np.float32)}
    settings = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    fields = fields_of(folder) | {"quantization_config": settings}
    eight = sources.write(shell.place / "fp8", arrays, **fields)
    rules = recipe(shell.place)
    outcome = shell.run("quantize", eight, shell.place / "codes", "--recipe", rules)
    assert "dequantised first (1 x FP8" in outcome.err
    assert bits(read(shell.place / "codes")) == expected
    record = read_record(shell.place / "codes")
    assert record is not None
    assert sum(record.formats.values()) == 1


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ([{"pattern": "*.mlp.experts.*", "bits": 3, "group_size": 64}], ("down_proj", "32", "64")),
        ([{"pattern": "*", "bits": 4, "group_size": 32}], ("mlp.gate.weight", "norm.weight")),
        ([{"pattern": "*.nowhere", "bits": 4, "group_size": 32}], ("mine", "*.nowhere")),
        ([{"pattern": "*", "keep": True}], ("mine",)),
    ],
)
def test_recipes_that_do_not_fit_the_model(shell, rules, words):
    folder = source(shell.place / "source")
    destination = shell.place / "codes"
    file = recipe(shell.place, rules)
    outcome = shell.run("quantize", folder, destination, "-q", "--recipe", file)
    assert outcome.code == 2
    assert [word for word in words if word not in outcome.err] == []
    assert list(shell.place.glob("codes*")) == []


def test_odd_matrices_by_a_recipe_of_ones_own(shell):
    """One output (the shared expert's gate) and two (`in_proj_a`) can be forced into codes."""
    names = ("*.mlp.shared_expert_gate.weight", "*.linear_attn.in_proj_a.weight")
    rules = recipe(
        shell.place, [{"pattern": name, "bits": 3, "group_size": 32} for name in (*names, "*.no")]
    )
    folder = source(shell.place / "source")
    outcome = shell.run("quantize", folder, shell.place / "codes", "--recipe", rules)
    assert outcome.code == 0, outcome.err
    assert "patterns that match no tensor of this model: *.no" in outcome.err
    found, plain = read(shell.place / "codes"), read(folder)
    for key in ("model.layers.0.linear_attn.in_proj_a", "model.layers.1.mlp.shared_expert_gate"):
        weight = plain[f"{key}.weight"].astype(np.float64)
        made = dequantised(found, f"{key}.weight", 80, 32)
        assert np.linalg.norm(made - weight) < 0.2 * np.linalg.norm(weight)


def test_plain_weights_made_of_codes_name_no_recipe(shell):
    codes = quantised(shell, source(shell.place / "source"))
    record = read_record(shell.convert(codes))
    assert record is not None
    assert (record.recipe, record.files) == ("", {})
    assert sum(record.formats.values()) == len(fields_of(codes)["quantization_config"]["tensors"])


def test_verification_looks_at_the_files_beside_the_tensors(shell):
    codes = quantised(shell, source(shell.place / "source"))
    assert shell.run("convert", codes, "--verify").code == 0
    config = json.loads((codes / "config.json").read_text())
    config["quantization_config"]["recipe"] = "q3"
    (codes / "config.json").write_text(json.dumps(config))
    outcome = shell.run("convert", codes, "--verify")
    assert (outcome.code, outcome.out) == (1, "")
    assert "written there: quantization_config of config.json" in outcome.err
    record = json.loads((codes / "conversion.json").read_text())
    del record["files"]
    (codes / "conversion.json").write_text(json.dumps(record))
    outcome = shell.run("convert", codes, "--verify")
    assert outcome.code == 0
    assert "an older version recorded nothing of them" in outcome.err
