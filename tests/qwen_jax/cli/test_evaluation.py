"""`qwen-jax perplexity`, `divergence` and `evaluate`: figures, reuse of a base, and refusals."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import qwen_jax
from qwen_jax.cli.evaluation import ActivationFlags
from qwen_jax.text import Tokenizer

CUT = ("--window", "32", "--batch-size", "2", "-q")
USAGE, FAILURE = 2, 1


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("texts") / "text.txt"
    path.write_text("And Moses said unto the people, Stand by, and I will hear. " * 8)
    return str(path)


@pytest.fixture(scope="module")
def other(write_tiny, tmp_path_factory) -> str:
    """The tiny model with every value rounded to a sixteenth."""
    folder = write_tiny(tmp_path_factory.mktemp("models") / "other")
    weights = load_file(folder / "model.safetensors")
    save_file({k: np.round(v * 16) / 16 for k, v in weights.items()}, folder / "model.safetensors")
    return str(folder)


def refused(outcome, code: int, *words: str) -> None:
    assert (outcome.code, outcome.out) == (code, ""), outcome.err
    assert "Traceback" not in outcome.err
    assert [word for word in words if word not in outcome.err] == []


def expected_losses(folder: str, text: str) -> np.ndarray:
    """Each window of 32 tokens by a plain call of the model."""
    model, tokenizer = qwen_jax.load(folder, dtype="float32")
    assert tokenizer is not None
    ids = np.array(tokenizer.encode(Path(text).read_text()), np.int32)
    losses = []
    for begin in range(0, len(ids), 32):
        row = np.zeros((1, 32), np.int32)
        part = ids[begin : begin + 32]
        row[0, : len(part)] = part
        logits = np.asarray(model(row).logits, np.float64)[0]
        logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        losses += [-logs[i - 1, part[i]] for i in range(1, len(part))]
    return np.array(losses)


def test_perplexity_is_that_of_plain_calls(run, tiny, text):
    outcome = run("perplexity", tiny, text, *CUT, "--json")
    assert (outcome.code, outcome.err) == (0, "")
    found = json.loads(outcome.out)
    losses = expected_losses(tiny, text)
    assert found["mean_nll"] == pytest.approx(losses.mean(), abs=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(losses.mean()), rel=1e-4)
    assert (found["window"], found["stride"], found["texts"]) == (32, 32, [text])
    assert found["scored_tokens"] == len(losses)
    assert found["share_of_tokens"] == pytest.approx(len(losses) / found["tokens"])
    shown = run("perplexity", tiny, text, *CUT).out
    assert f"{found['perplexity']:.4f}" in shown
    assert f"{found['windows']} windows of 32 tokens, stride 32" in shown


def test_stride_and_number_of_windows(run, tiny, text):
    flags = ("--stride", "8", "--max-windows", "3", "--json")
    found = json.loads(run("perplexity", tiny, text, text, *CUT, *flags).out)
    assert (found["windows"], found["scored_tokens"], found["tokens"]) == (3, 47, 48)


def test_divergence_with_and_without_a_stored_base(run, tiny, other, text, tmp_path):
    file = tmp_path / "base"
    flags = (*CUT, "--json")
    direct = run("divergence", tiny, other, text, *flags)
    assert (direct.code, direct.err) == (0, "")
    found = json.loads(direct.out)
    assert found["base"]["model"] == tiny
    assert 0 < found["median_kl"] < found["p99_kl"] <= found["max_kl"] < 1
    assert 0 < found["mean_kl"] < found["p99_kl"]
    ratio = found["other_perplexity"]["perplexity"] / found["base_perplexity"]["perplexity"]
    assert found["perplexity_ratio"] == pytest.approx(ratio)
    losses = expected_losses(other, text)
    assert found["other_perplexity"]["mean_nll"] == pytest.approx(losses.mean(), abs=1e-5)

    stored = ("--base-logprobs", str(file))
    assert json.loads(run("divergence", tiny, other, text, *flags, *stored).out) == found
    assert json.loads(run("divergence", tiny, other, text, *flags, *stored).out) == found
    itself = json.loads(run("divergence", tiny, tiny, text, *flags, *stored).out)
    assert (itself["max_kl"], itself["top1_agreement"]) == (0, 1)
    shown = run("divergence", tiny, other, text, *CUT, *stored).out
    assert f"mean {found['mean_kl']:.6f}" in shown
    # Another model, or the same text cut in another way.
    words = ("does not fit", "digest of the base's files")
    refused(run("divergence", other, tiny, text, *flags, *stored), USAGE, *words)
    wider = ("--window", "40", *stored)
    refused(run("divergence", tiny, other, text, *wider), USAGE, "digest of text and windows")
    bf16 = ("--dtype", "bfloat16", *stored)
    refused(run("divergence", tiny, other, text, *CUT, *bf16), USAGE, "the base's dtype")


@pytest.mark.filterwarnings("default:the codes of:UserWarning")
@pytest.mark.parametrize("fitted", ["calibration", "distillation"])
def test_text_that_codes_were_fitted_to_is_told(run, tiny, text, tmp_path, fitted):
    folder = tmp_path / "coded"
    shutil.copytree(tiny, folder)
    digest = hashlib.sha256(Path(text).read_bytes()).hexdigest()
    calibration = {"files": [{"name": "t", "sha256": digest}]}
    runs = {"calibration": calibration}
    content = runs if fitted == "calibration" else {"calibration": None, "distillation": [runs]}
    (folder / "quantization_report.json").write_text(json.dumps(content))
    flags = (*CUT, "--max-windows", "1", "--json")
    other = tmp_path / "other.txt"
    other.write_text(Path(text).read_text() + " And so on.")
    for command in (("perplexity",), ("divergence", tiny)):
        outcome = run(*command, str(folder), text, *flags)
        warning = f"warning: the codes of {folder} were fitted to {text}"
        assert outcome.err.startswith(warning) and outcome.err.count("\n") == 1
        found = json.loads(outcome.out)
        assert found.get("other", found)["calibrated_on"] == [text]
        unknown = run(*command, str(folder), str(other), *flags)
        assert unknown.err == ""
        found = json.loads(unknown.out)
        assert found.get("other", found)["calibrated_on"] == []
    (folder / "quantization_report.json").write_text('{"calibration": 3}')
    refused(run("perplexity", str(folder), text, *flags), FAILURE, "quantization_report.json")


def test_activations_in_few_bits(run, tiny, text, tmp_path):
    calibration = tmp_path / "calibration.txt"
    calibration.write_text("In the beginning God created the heaven and the earth. " * 8)
    flags = ("--activation-bits", "4", "--activation-calibration", str(calibration), "--json")
    found = json.loads(run("divergence", tiny, tiny, text, *CUT, *flags).out)
    losses = expected_losses(tiny, text)
    assert found["base_perplexity"]["mean_nll"] == pytest.approx(losses.mean(), abs=1e-5)
    assert found["mean_kl"] > 1e-7
    kept = {"bits": 4, "kind": "static", "calibration": [str(calibration)]}
    assert found["activations"] == kept
    assert ActivationFlags(activation_bits=4).kind == "dynamic"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--window", "1"), ["--window is 1;"]),
        (("--window", "129"), ["--window is 129", "128 tokens"]),
        (("--window", "32", "--stride", "33"), ["--stride is 33", "1 to 32"]),
        (("--window", "128"), ["has no document of 128 tokens"]),
        (("--batch-size", "0", "--window", "8"), ["--batch-size is 0"]),
        (("--max-windows", "0", "--window", "8"), ["--max-windows is 0"]),
        (("--activation-bits", "2"), ["activation bits are 2", "3 to 8"]),
        (("--activation-calibration", "a"), ["--activation-bits"]),
    ],
)
def test_flags_are_refused(run, tiny, text, tmp_path, flags, words):
    short = tmp_path / "short.txt"
    short.write_text(Path(text).read_text()[:300])
    refused(run("perplexity", tiny, str(short), *flags), USAGE, *words)


def test_texts_are_refused(run, tiny, text, tmp_path, write_tiny):
    np.save(tmp_path / "far.npy", np.array([4096] * 40))
    refused(run("perplexity", tiny, str(tmp_path / "far.npy"), *CUT), USAGE, "id 4096 at 0")
    refused(run("perplexity", tiny, str(tmp_path / "none"), *CUT), USAGE, "cannot be read")
    refused(run("perplexity", tiny), USAGE, "TEXT")
    same = ("--activation-bits", "8", "--activation-calibration", text)
    refused(run("perplexity", tiny, text, *CUT, *same), USAGE, "evaluated and calibrated on")
    mute = str(write_tiny(tmp_path / "mute", tokenizer=False))
    refused(run("perplexity", mute, text, *CUT), USAGE, "has no tokenizer")


@pytest.mark.parametrize("flag", ["--revision", "--other-revision"])
def test_revisions_are_for_the_hub(run, tiny, text, flag):
    words = ("revision 'main'", "not on the Hub")
    refused(run("divergence", tiny, tiny, text, *CUT, flag, "main"), USAGE, *words)


def test_models_of_other_vocabularies_are_refused(run, tiny, text, tmp_path, write_tiny):
    larger = str(write_tiny(tmp_path / "larger", vocab_size=4100))
    refused(run("divergence", tiny, larger, text, *CUT), USAGE, "4096", "4100")
    renamed = write_tiny(tmp_path / "renamed")
    spec = json.loads((renamed / "tokenizer.json").read_text())
    vocabulary = spec["model"]["vocab"]
    token = next(t for t, i in vocabulary.items() if i == 300)
    swapped = next(t for t, i in vocabulary.items() if i == 301)
    vocabulary[token], vocabulary[swapped] = 301, 300
    (renamed / "tokenizer.json").write_text(json.dumps(spec))
    assert Tokenizer.from_folder(renamed) is not None
    words = ("tokenizers of", "differ in 2 entries")
    refused(run("divergence", tiny, str(renamed), text, *CUT), USAGE, *words)
    spec = json.loads((Path(tiny) / "tokenizer.json").read_text())
    spec["normalizer"] = {"type": "Lowercase"}
    (renamed / "tokenizer.json").write_text(json.dumps(spec))
    words = ("give different tokens for",)
    refused(run("divergence", tiny, str(renamed), text, *CUT), USAGE, *words)
    # Fewer merges: another number of tokens too.
    spec["normalizer"], spec["model"]["merges"] = None, spec["model"]["merges"][:1000]
    (renamed / "tokenizer.json").write_text(json.dumps(spec))
    refused(run("divergence", tiny, str(renamed), text, *CUT), USAGE, *words)


def test_nan_logits_fail_with_the_window(run, text, tmp_path, write_tiny):
    folder = write_tiny(tmp_path / "broken")
    weights = load_file(folder / "model.safetensors")
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer is not None
    ids = tokenizer.encode(Path(text).read_text() + " Pharaoh")
    (tmp_path / "late.txt").write_text(Path(text).read_text() + " Pharaoh went")
    weights["model.embed_tokens.weight"][ids[-1]] = np.nan
    save_file(weights, folder / "model.safetensors")
    outcome = run("perplexity", str(folder), str(tmp_path / "late.txt"), *CUT)
    refused(outcome, FAILURE, "NaN or infinite logits in window", "late.txt")


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is not None, reason="lm-eval is here")
def test_tasks_need_the_extra(run, tiny):
    refused(run("evaluate", tiny, "--tasks", "a"), USAGE, "pip install 'qwen-jax[eval]'")


@pytest.mark.filterwarnings("ignore")
def test_unknown_tasks_are_refused(run, tiny, tmp_path):
    pytest.importorskip("lm_eval")
    refused(run("evaluate", tiny, "--tasks", "no_such"), USAGE, "knows no task", "no_such")
    flags = ("--tasks", "arc_easy", "--include_path", str(tmp_path / "none"))
    refused(run("evaluate", tiny, *flags), USAGE, "is not a folder")


def test_two_models_that_do_not_fit_together(run, tiny, other, text, monkeypatch):
    from qwen_jax import loading
    from qwen_jax.errors import MemoryLimitError

    load = loading.load

    def limited(path, **options):
        if str(path) == other:
            raise MemoryLimitError("too little")
        return load(path, **options)

    monkeypatch.setattr(loading, "load", limited)
    refused(run("divergence", tiny, other, text, *CUT), FAILURE, "too little", "--base-logprobs")
