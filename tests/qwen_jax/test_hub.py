"""Models of the Hub, from a Hub on this machine and from caches made by hand. No network."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from qwen_jax import hub
from qwen_jax.errors import CheckpointError, ConfigError, RequestError
from qwen_jax.loading import find_folder, find_runnable
from tests.qwen_jax.fake_hub import COMMIT, FakeHub, put

ROOT = Path(__file__).parents[2]
INDEX = "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
PLACED = json.dumps({"weight_map": {"a": SHARDS[0], "b": SHARDS[1], "c": SHARDS[0]}}).encode()
SIDE = {
    "config.json": b'{"model_type": "no_such_model"}',
    "tokenizer.json": b"{ }",
    "tokenizer_config.json": b"{  }",
    INDEX: PLACED,
}
WEIGHTS = {SHARDS[0]: b"first", SHARDS[1]: b"second"}
UNWANTED = (
    ".gitattributes README.md consolidated.safetensors model-00003-of-00003.safetensors "
    "model.gguf onnx/config.json onnx/model.safetensors pytorch_model.bin pytorch_model.pt"
).split()
CONFIG = {"config.json": b"{}"}
MODELS = {
    "org/sharded": SIDE | WEIGHTS | {name: name.encode() for name in UNWANTED},
    "org/single": CONFIG | {"weights.safetensors": b"w", "consolidated.safetensors": b"c"},
    "org/plain": CONFIG | {"model.safetensors": b"m", "other.safetensors": b"o"},
    "org/many": CONFIG | {"a.safetensors": b"a", "b.safetensors": b"b"},
    "org/pickle": CONFIG | {"pytorch_model.bin": b"p"},
    "org/gguf": {"model-Q4.gguf": b"g"},
    "org/hostile": CONFIG | {INDEX: b'{"weight_map": {"a": "../../../x.safetensors"}}'},
    "org/damaged": CONFIG | {INDEX: b'{"weight_map"'},
}
REFUSED = {
    "org/gated": (403, "GatedRepo"),
    "org/private": (401, "RepoNotFound"),
    "org/login": (401, ""),
    "org/down": (503, ""),
}

PROGRAM = """
import json, sys
from qwen_jax import errors, hub
for model, revision, weights in json.loads(sys.argv[1]):
    try:
        folder = hub.fetch(model, revision, weights=weights, quiet=True)
        print(json.dumps([str(folder), ""]))
    except errors.CheckpointError as error:
        print(json.dumps(["", str(error)]))
"""


@pytest.fixture(scope="module")
def server() -> Iterator[FakeHub]:
    with FakeHub(MODELS, REFUSED).running() as server:
        yield server


@pytest.fixture
def fetch(server: FakeHub, tmp_path: Path) -> Callable[..., list[tuple[str, str]]]:
    """Fetches in another process, since the library reads the environment when it is imported.

    Args: models, revision, whether weights are wanted; further environment variables.

    Returns: folder, or "", and error, or "", of each model.
    """

    def fetch(
        *models: str, revision: str | None = None, weights: bool = True, **environment: str
    ) -> list[tuple[str, str]]:
        settings = {"HF_ENDPOINT": server.address, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
        kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        wanted = json.dumps([(model, revision, weights) for model in models])
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, wanted],
            cwd=ROOT,
            env=kept | settings | environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return [tuple(json.loads(line)) for line in done.stdout.splitlines()]

    return fetch


def held(folder: str | Path) -> dict[str, bytes]:
    files = [file for file in Path(folder).rglob("*") if file.is_file()]
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def test_only_needed_files_are_fetched_once(server, fetch, tmp_path):
    server.fetched.clear()
    ((folder, _),) = fetch("org/sharded", weights=False)
    assert server.fetched == set(SIDE)
    assert held(folder) == SIDE
    assert not hub.has_weights(Path(folder))

    server.fetched.clear()
    (same, _), (single, _), (plain, _) = fetch("org/sharded", "org/single", "org/plain")
    assert server.fetched == {*WEIGHTS, *CONFIG, "weights.safetensors", "model.safetensors"}
    assert (same, held(folder)) == (folder, SIDE | WEIGHTS)
    assert held(single) == CONFIG | {"weights.safetensors": b"w"}
    assert held(plain) == CONFIG | {"model.safetensors": b"m"}
    assert all(hub.has_weights(Path(found)) for found in (folder, single, plain))

    server.fetched.clear()
    assert fetch("org/sharded", "org/single", revision=COMMIT) == [(folder, ""), (single, "")]
    nowhere = fetch("org/sharded", "org/none", HF_ENDPOINT="http://127.0.0.1:9")
    assert nowhere[0] == (folder, "")
    assert "http://127.0.0.1:9 cannot be reached" in nowhere[1][1]
    assert f"the cache {tmp_path / 'hub'} does not hold" in nowhere[1][1]
    assert server.fetched == set()


def test_what_cannot_be_had_is_said_with_the_way_out(server, fetch):
    expected = {
        "org/none": "no folder org/none, and the Hub shows no model of that name",
        "org/private": "`hf auth login` if the model is private",
        "org/gated": f"ask for access on {server.address}/org/gated, run `hf auth login`",
        "org/login": "the Hub refuses access",
        "org/down": "503",
        "org/many": "several safetensors files and no model.safetensors.index.json (it has a.safe",
        "org/pickle": "no safetensors weights and no model.safetensors.index.json (it has config",
        "org/gguf": "no config.json (it has model-Q4.gguf)",
        "org/hostile": "refused paths (1):\n    ../../../x.safetensors",
        "org/damaged": f"{INDEX} cannot be read",
    }
    for (model, part), (folder, error) in zip(expected.items(), fetch(*expected), strict=True):
        assert folder == "" and part in error, (model, error)
        assert len(error) < 700
    ((_, error),) = fetch("org/sharded", revision="v9")
    assert "there is no org/sharded at revision v9" in error


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache of a library that may not use the network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def test_cached_model_needs_no_network(cache):
    folder = put(cache, "org/name", SIDE | WEIGHTS)
    older = put(cache, "org/name", SIDE | WEIGHTS, "f" * 40, "v1")
    assert hub.fetch("org/name") == folder
    assert hub.fetch("org/name", "v1") == hub.fetch("org/name", "f" * 40) == older
    with pytest.raises(CheckpointError, match=r"HF_HUB_OFFLINE is set.*org/name at revision v2"):
        hub.fetch("org/name", "v2")
    with pytest.raises(CheckpointError, match=r"unset it, fetch .*`hf download org/other`"):
        hub.fetch("org/other")


def test_incomplete_cache_is_refused_where_its_weights_are_wanted(cache):
    folder = put(cache, "org/name", SIDE | {SHARDS[0]: b"first"})
    assert hub.fetch("org/name", weights=False) == folder
    # Versions of the library differ in who notices.
    told = rf"1 of the weight files .* such as {SHARDS[1]}|does not hold all that is needed of org"
    with pytest.raises(CheckpointError, match=told):
        hub.fetch("org/name")
    with pytest.raises(CheckpointError, match="HF_HUB_OFFLINE"):
        hub.fetch_weights("org/name", folder)
    put(cache, "org/bare", CONFIG)
    with pytest.raises(CheckpointError, match="no safetensors weights"):
        hub.fetch("org/bare")
    put(cache, "org/tokens", {"tokenizer.json": b"{}"})
    with pytest.raises(CheckpointError, match=r"org/tokens has no config\.json"):
        hub.fetch("org/tokens")


def test_configuration_is_read_before_weights_are_fetched(cache):
    folder = put(cache, "org/name", SIDE)
    assert find_folder("org/name", weights=False) == folder
    with pytest.raises(ConfigError, match="no_such_model"):
        find_folder("org/name")
    fields = {"model_type": "qwen3", "quantization_config": {"quant_method": "gptq", "bits": 4}}
    put(cache, "org/packed", SIDE | {"config.json": json.dumps(fields).encode()})
    with pytest.raises(CheckpointError, match=r"GPTQ.*qwen-jax convert org/packed DESTINATION"):
        find_runnable("org/packed")


def test_folder_goes_before_a_hub_id(cache, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cached = put(cache, "org/name", SIDE)
    assert find_folder("org/name", "main", weights=False) == cached
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert find_folder("org/name", weights=False) == Path("org/name")
    with pytest.raises(RequestError, match="'main' is given for 'org/name', which is not on"):
        find_folder("org/name", "main")


@pytest.mark.parametrize("path", ["demo", Path("org/name"), "/nowhere/name", "name"])
def test_revision_of_what_is_not_on_the_hub_is_refused(path):
    with pytest.raises(RequestError, match="organisation/name, or leave the revision out"):
        find_folder(path, "main")


def test_empty_revision_is_refused():
    with pytest.raises(RequestError, match="revision is empty"):
        find_folder("org/name", " ")


def test_empty_path_is_refused_where_a_folder_lies_too(monkeypatch, demo_path):
    monkeypatch.chdir(demo_path)
    with pytest.raises(RequestError, match="the model is empty"):
        find_folder("")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Qwen/Qwen3-30B-A3B", True),
        ("o/n", True),
        ("a_b/c.d-e_", True),
        ("Qwen", False),
        ("demo", False),
        ("a/b/c", False),
        ("/a/b", False),
        ("./b", False),
        ("../b", False),
        ("a/", False),
        ("/b", False),
        ("~/models", False),
        ("a/-b", False),
        ("a/b.", False),
        ("a/b--c", False),
        ("a/b..c", False),
        ("a/b.git", False),
        ("a/b c", False),
        ("a/b\n", False),
        ("a/é", False),
        ("a/" + "b" * 96, True),
        ("a/" + "b" * 97, False),
        ("", False),
    ],
)
def test_alphabet_of_ids(text, expected):
    from huggingface_hub.utils import validate_repo_id

    assert hub.is_hub_id(text) is expected
    if expected:
        validate_repo_id(text)


def chained(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


def refusal(status: int) -> Exception:
    error = OSError(f"{status} Client Error\nsecond line")
    error.response = SimpleNamespace(status_code=status)  # type: ignore[attr-defined]
    return error


@pytest.mark.parametrize(
    ("error", "parts"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), ["disk is full", "HF_HOME"]),
        (RuntimeError("Data: No space left on device (os error 28)"), ["disk is full"]),
        (chained(ValueError("x"), OSError(errno.EDQUOT, "Quota")), ["disk is full", "are kept"]),
        (PermissionError(errno.EACCES, "Denied", "/cache/x"), ["'/cache/x'", "set HF_HOME"]),
        (refusal(403), ["refuses access", "hf auth login", "403 Client Error)"]),
        (RuntimeError("first\nsecond"), ["(RuntimeError: first); repeat", "local folder"]),
        (KeyError(), ["(KeyError: KeyError)"]),
    ],
)
def test_failure_of_the_library_is_one_message(cache, monkeypatch, error, parts):
    def fail(*_: Any, **__: Any) -> str:
        raise error

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(CheckpointError) as caught:
        hub.fetch("org/name", "v1")
    message = str(caught.value)
    assert [part for part in parts if part not in message] == []
    assert "\n" not in message and caught.value.__cause__ is error


@pytest.mark.parametrize("quiet", [False, True])
def test_progress_bars_are_hidden_while_quiet(cache, monkeypatch, quiet):
    import huggingface_hub
    from huggingface_hub.utils import are_progress_bars_disabled

    put(cache, "org/name", SIDE | WEIGHTS)
    download, seen = huggingface_hub.snapshot_download, []

    def watched(*arguments: Any, **options: Any) -> Any:
        seen.append(are_progress_bars_disabled())
        return download(*arguments, **options)

    monkeypatch.setattr("huggingface_hub.snapshot_download", watched)
    monkeypatch.delenv("HF_HUB_DISABLE_PROGRESS_BARS", raising=False)
    before = are_progress_bars_disabled()
    hub.fetch("org/name", weights=False, quiet=quiet)
    assert (seen, are_progress_bars_disabled()) == ([quiet], before)
