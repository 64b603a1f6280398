"""`quantize` as a person uses it: dry runs of shapes, and wrong usage. Folders: tests/convert."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from qwen_jax.quant import RECIPES

ROOT = Path(__file__).parents[3]
USAGE = 2
SHAPE = "qwen3.6-35b-a3b"


def dry(run, *arguments: str) -> dict:
    outcome = run("quantize", SHAPE, "--dry-run", "--json", *arguments)
    assert (outcome.code, outcome.err) == (0, "")
    return json.loads(outcome.out)


@pytest.mark.parametrize(("recipe", "most"), [("q3", 16.0e9), ("q3-small", 14.5e9)])
def test_file_of_the_35b_model_with_its_mtp_layer(run, recipe, most):
    plan = dry(run, "--recipe", recipe)
    assert plan["file_bytes"] <= most
    assert 3 < plan["bits_per_text_weight"] < 3.5
    assert plan["mtp_bytes"] > 0.3e9
    # Headers alone come on top: 43 parts, each a shard.
    assert 0 < plan["file_bytes"] - plan["tensor_bytes"] < 43 * 8192
    # 40 layers and the MTP layer: 30 and 11 of two kinds of attention, shared expert, two stacks.
    assert plan["tensors_in_codes"] == 30 * 3 + 11 * 4 + 41 * (3 + 2) + 2
    assert plan["kept"]["mlp.gate"] == plan["kept"]["mlp.shared_expert_gate"] == 41
    assert plan["kept"]["linear_attn.A_log"] == plan["kept"]["linear_attn.in_proj_a"] == 30


def test_bits_are_short_for_a_recipe(run):
    assert dry(run) == dry(run, "--bits", "3") == dry(run, "--recipe", "q3")
    assert dry(run, "--bits", "8") == dry(run, "--recipe", "q8")


def test_a_dry_run_for_readers(run):
    outcome = run("quantize", SHAPE, "--dry-run")
    plan = dry(run)
    rows = dict(line.split("  ", 1) for line in outcome.out.splitlines() if not line[0].isspace())
    assert f"{plan['file_bytes']:,} bytes, {plan['tensor_bytes']:,} of them" in rows["files"]
    assert f"{plan['bits_per_text_weight']:.3f}" in rows["bits"]
    assert "counted from its configuration" in rows["source"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_table_in_the_documentation(run, recipe):
    text = (ROOT / "docs" / "quantization.md").read_text(encoding="utf-8")
    row = re.search(rf"^\| `{recipe}`.*\| ([\d.]+) GB \| ([\d.]+) \|$", text, re.MULTILINE)
    assert row is not None
    plan = dry(run, "--recipe", recipe)
    sizes = f"{plan['file_bytes'] / 1e9:.2f}", f"{plan['bits_per_text_weight']:.3f}"
    assert row.groups() == sizes


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((SHAPE, "--bits", "3"), ("no destination", "--dry-run")),
        ((SHAPE, "--bits", "5", "--dry-run"), ("5",)),
        (
            (SHAPE, "--bits", "4", "--recipe", "q3", "--dry-run"),
            ("--bits 4 is short for --recipe q4",),
        ),
        ((SHAPE, "--recipe", "q5", "--dry-run"), ("'q5'", "q3-small", ".json")),
        ((SHAPE, "--method", "gptq", "--dry-run"), ("method gptq", "--calibration")),
        ((SHAPE, "--window", "5", "--dry-run"), ("--window: without --calibration",)),
        (
            (SHAPE, "--chat-template", "x", "--calibration-windows", "2", "--dry-run"),
            ("--calibration-windows, --chat-template: without --calibration",),
        ),
        (
            (SHAPE, "--calibration", __file__, "--window", "-5", "--dry-run"),
            ("windows of -5 tokens; accepted are",),
        ),
        (("nothing", "--dry-run"), ("no folder and no preset 'nothing'",)),
        ((SHAPE, "out"), ("names a shape, which has no weights", "--dry-run")),
        (("demo", "--recipe", "q3-small", "--dry-run"), ("64", "128", "experts.down_proj")),
        (("demo", "--calibration", "nothing.txt", "--dry-run"), ("nothing.txt",)),
    ],
)
def test_wrong_usage(run, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    outcome = run("quantize", *arguments)
    assert outcome.code != 0
    assert outcome.out == ""
    assert [word for word in words if word not in outcome.err] == [], outcome.err
    assert outcome.err.count("error: ") == 1
    assert list(tmp_path.iterdir()) == []
