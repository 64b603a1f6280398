"""Hub ids as model arguments, from a cache and without a network."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qwen_jax.cli.bench_request import BenchRequest
from qwen_jax.cli.console import Notes
from qwen_jax.cli.loading import ModelFolder
from qwen_jax.cli.shape import find_shape
from qwen_jax.errors import CheckpointError, RequestError
from tests.qwen_jax.fake_hub import COMMIT, put

SIDE = ("config.json", "tokenizer.json", "tokenizer_config.json")


@pytest.fixture
def cached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny: str) -> Path:
    """A cache with a whole model, org/whole, and one without weights, org/side. No network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    files = {name: (Path(tiny) / name).read_bytes() for name in (*SIDE, "model.safetensors")}
    put(tmp_path, "org/side", {name: files[name] for name in SIDE})
    return put(tmp_path, "org/whole", files, ref="v1")


def test_inspect_reads_cached_weights(run, cached):
    outcome = run("inspect", "org/whole", "--revision", "v1", "--json")
    assert (outcome.code, outcome.err) == (0, "")
    report = json.loads(outcome.out)
    assert report["model"] == "org/whole"
    assert report["folder"]["path"] == str(cached)
    assert report["folder"]["tensors"] == 13


def test_inspect_needs_no_weights(run, cached):
    outcome = run("inspect", "org/side", "--json")
    assert (outcome.code, outcome.err) == (0, "")
    report = json.loads(outcome.out)
    assert report["folder"]["weights"].startswith("on the Hub, not fetched")
    assert report["cost"]["parameters"]["total"] > 0
    assert "not fetched" in run("inspect", "org/side").out


@pytest.mark.parametrize("verb", ["generate", "chat", "inspect", "bench"])
@pytest.mark.parametrize(
    ("arguments", "code", "parts"),
    [
        (("org/none",), 1, ("HF_HUB_OFFLINE is set", "hf download org/none")),
        (("org/whole", "--revision", "v2"), 1, ("org/whole at revision v2",)),
        (("demo", "--revision", "main"), 2, ("'main' is given for 'demo'",)),
        (("org/whole", "--revision="), 2, ("revision is empty",)),
    ],
)
def test_what_cannot_be_had_is_refused(run, cached, verb, arguments, code, parts):
    prompt = ("--prompt", "a") if verb == "generate" else ()
    outcome = run(verb, *arguments, *prompt, "--quiet" if verb != "inspect" else "--json")
    assert (outcome.code, outcome.out) == (code, "")
    assert [part for part in parts if part not in outcome.err] == []
    assert outcome.err.count("\n") == 1


def test_revision_of_a_preset_is_refused():
    with pytest.raises(RequestError, match="qwen3-30b-a3b is a preset"):
        find_shape("qwen3-30b-a3b", "main")


def test_model_to_run_comes_with_its_weights(cached, capsys):
    folder = ModelFolder.open("org/whole", "float32", Notes(), "v1")
    assert folder.path == cached
    assert folder.tokenizer is not None
    folder.refuse_early(8)
    assert "org/whole: fetching from the Hub" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match="org/side has no safetensors weights"):
        ModelFolder.open("org/side", "float32", Notes(quiet=True))


def test_bench_of_random_weights_needs_none(cached):
    shape = find_shape("org/side", weights=False)
    assert (shape.fetched, shape.config.hidden_size) == (True, 32)
    with pytest.raises(CheckpointError, match="org/side has no safetensors weights"):
        find_shape("org/side")
    request = BenchRequest(model="org/side", revision=COMMIT)
    assert request.arguments() == ["org/side", "--revision", COMMIT]
