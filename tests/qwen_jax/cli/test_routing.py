"""`qwen-jax routing`: what it writes, and what it refuses before a model is loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import qwen_jax
from qwen_jax.research import load_trace, statistics, trace_of

USAGE, FAILURE = 2, 1
SPARSE = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 2,
    "mlp_only_layers": [0],
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
}
TEXT = "And Moses said unto the people, <b>Stand</b> by 40 days, and I will hear.\n" * 3


@pytest.fixture(scope="module")
def sparse(write_tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny(tmp_path_factory.mktemp("models") / "sparse", **SPARSE))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("texts") / "text <i>.txt"
    path.write_text(TEXT)
    return str(path)


def test_report_and_trace_are_written(run, sparse, text, tmp_path):
    pytest.importorskip("matplotlib")
    out = tmp_path / "out"
    flags = ("--window", "32", "--max-tokens", "50", "--trace", "--json", "-q")
    outcome = run("routing", sparse, "--text", text, "--out", str(out), *flags)
    assert (outcome.code, outcome.err) == (0, "")
    found = json.loads(outcome.out)
    model, tokenizer = qwen_jax.load(sparse, dtype="float32")
    assert tokenizer is not None
    everything = tokenizer.encode(TEXT)
    ids = everything[:50]
    tokens, lengths = np.zeros((2, 32), np.int32), np.array([32, 18])
    tokens[0], tokens[1, :18] = ids[:32], ids[32:]
    expected = trace_of(model.config, model(tokens, lengths).routing, tokens, lengths)
    trace = load_trace(out / "trace.safetensors", model.config)
    np.testing.assert_array_equal(trace.tokens, ids)
    np.testing.assert_array_equal(trace.ids, expected.ids)
    loads = statistics.load(statistics.counts_of(expected.ids, 6))
    np.testing.assert_allclose(found["loads"], loads)
    assert [row["layer"] for row in found["layers"]] == [1]
    assert (found["tokens"], found["out"]) == (50, str(out))
    stored = json.loads((out / "routing.json").read_text())
    assert stored["loads"] == found["loads"]
    assert stored["facts"]["tokens"] == (f"50 of {len(everything)}, in 2 windows of at most 32")
    page = (out / "report.html").read_text()
    assert "&lt;i&gt;.txt" in page and "<i>" not in page
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (out / "trace.safetensors").stat().st_mode == (out / "report.html").stat().st_mode


def refused(outcome, code: int, *words: str) -> None:
    assert (outcome.code, outcome.out) == (code, ""), outcome.err
    assert "Traceback" not in outcome.err
    assert [word for word in words if word not in outcome.err] == []


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--window", "0"), ["--window is 0"]),
        (("--window", "129"), ["--window is 129", "128 tokens"]),
        (("--max-tokens", "0", "--window", "8"), ["--max-tokens is 0"]),
        (("--batch-size", "0", "--window", "8"), ["--batch-size is 0"]),
        (("--prefill-chunk-size", "-1", "--window", "8"), ["--prefill-chunk-size is -1"]),
        (("--text", "none", "--window", "8"), ["none cannot be read"]),
        (("--max-tokens", "2.5"), ["'2.5' is not a whole number"]),
    ],
)
def test_flags_are_refused(run, sparse, text, tmp_path, monkeypatch, flags, words):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("qwen_jax.loading.load", None)
    out = tmp_path / "out"
    refused(run("routing", sparse, "--text", text, "--out", str(out), *flags), USAGE, *words)
    assert not out.exists()


def test_models_and_folders_are_refused(run, tiny, sparse, text, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("qwen_jax.loading.load", None)
    out = str(tmp_path / "out")
    flags = ("--text", text, "--window", "8", "--out")
    refused(run("routing", tiny, *flags, out), USAGE, "no MoE layers", "qwen3 of 1 layers")
    refused(run("routing", "qwen3-30b-a3b", *flags, out), USAGE, "has no weights")
    refused(run("routing", sparse, "--out", out), USAGE, "--text")
    refused(run("routing", sparse, *flags, str(tmp_path / "a" / "b")), USAGE, "make it first")
    (tmp_path / "out").write_text("")
    refused(run("routing", sparse, *flags, out), USAGE, "is not a folder")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    refused(run("routing", sparse, *flags, str(tmp_path / "full")), USAGE, "is not empty")


def test_nothing_half_written_is_left(run, sparse, text, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")

    def broken(*_, **__):
        raise OSError("the disk is full")

    monkeypatch.setattr("qwen_jax.research.report.Report.write", broken)
    out = tmp_path / "out"
    outcome = run("routing", sparse, "--text", text, "--out", str(out), "--window", "32", "-q")
    refused(outcome, FAILURE, "the disk is full")
    assert [*tmp_path.iterdir()] == []
