"""The measured configurations: every entry has a meaning, and calls find it."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import tuning
from pallas_kernels._compat import H200, Target, lower_for_cuda, targeting
from pallas_kernels.block_attention.config import config_for

# Specs that are quick to trace, one for each kind of configuration.
OPERATIONS = {
    "attention_inputs": ("batch 1",),
    "block_attention": ("batch 1, 4k", "batch 1, 512, int8"),
    "delta_rule": ("decode, batch 1", "prefill, 32 x 512"),
    "dequant_matmul": ("1 row, delta net", "16 rows, attention", "4096 rows, 12288x2048"),
    "expert_dispatch": ("1 token", "512 tokens", "8192 tokens, bf16"),
    "rms_norm": ("1 row", "8192 rows"),
    "router": ("1 row, 8 of 256", "32 rows, 8 of 256"),
}
PACKAGED = sorted((Path(tuning.__file__).parent / "tuning_data").glob("*.json"))


@functools.cache
def decisions_of(operation: str, name: str) -> dict[tuple[str, str], tuning.Decision]:
    """What the call of a spec decides on an H200."""
    run = importlib.import_module(f"pallas_kernels.{operation}.api").OPERATION
    spec = importlib.import_module(f"pallas_kernels.{operation}.specs").SPECS[name]

    def call(*arrays: Any) -> Any:
        return run(*arrays, implementation="triton", **spec.settings())

    with targeting(H200), tuning.listening() as heard:
        jax.eval_shape(call, *spec.arguments())
    return heard


def decisions(operation: str) -> dict[tuple[str, str], tuning.Decision]:
    """Those of some specs."""
    return {
        place: decision
        for name in OPERATIONS[operation]
        for place, decision in decisions_of(operation, name).items()
    }


@pytest.fixture
def own_folder(monkeypatch, tmp_path):
    """An empty folder of the user's, in front of the package's."""
    monkeypatch.setenv("QWEN_JAX_TUNING", str(tmp_path))
    tuning.table.cache_clear()
    yield tmp_path
    tuning.table.cache_clear()


def write(folder: Path, written: Any, **changes: Any) -> None:
    content = tuning.content_of(H200.kind, {tuning.jax_version(): written}) | changes
    (folder / tuning.file_name(H200.kind)).write_text(json.dumps(content))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_call_has_a_key_and_other_configurations(operation):
    found = decisions(operation)
    assert found and any(decision.others for decision in found.values())
    for (kernel, _), decision in found.items():
        # Experts of many tokens are beside a shared one, which is a dense product.
        assert kernel.startswith((operation, "dequant_matmul"))
        assert decision.heuristic not in decision.others
        for config in decision.others:
            # Fields that JSON can hold, and the same again from them.
            fields = json.loads(json.dumps(tuning.as_fields(config)))
            assert tuning.built(fields, (type(config),)) == config


@pytest.mark.parametrize(
    ("blocks", "same"), [(8, False), (9, True), (10, True), (16, True), (17, False)]
)
def test_caches_of_about_one_length_share_an_entry(blocks, same):
    """Tuned in a cache of 576 tokens: it counts for 640, as a command makes it, and up to 1,024."""
    q = jax.ShapeDtypeStruct((1, 1, 16, 256), jnp.bfloat16)
    pool = jax.ShapeDtypeStruct((32, 2, 64, 256), jnp.bfloat16)

    def key(blocks: int) -> tuple[str, str]:
        table = jax.ShapeDtypeStruct((1, blocks), jnp.int32)
        with tuning.listening() as heard:
            config_for(H200, q, pool, table)
        [place] = heard
        return place

    assert (key(blocks) == key(9)) is same


def test_wide_queries_over_codes_have_an_entry_of_their_own():
    """What suits those of bfloat16 may need more shared memory than there is with them."""
    pool = jax.ShapeDtypeStruct((32, 2, 64, 256), jnp.int8)
    table = jax.ShapeDtypeStruct((1, 16), jnp.int32)
    with tuning.listening() as heard:
        for dtype in (jnp.bfloat16, jnp.float32):
            config_for(H200, jax.ShapeDtypeStruct((1, 1, 16, 256), dtype), pool, table)
    assert len(heard) == 2


@pytest.mark.parametrize("path", PACKAGED, ids=lambda path: path.stem)
def test_packaged_entries_have_a_meaning_and_differ_from_known_heuristics(path):
    content = json.loads(path.read_text())
    assert path.name == tuning.file_name(content["device"])
    assert content["format"] == tuning.FORMAT
    known = {place: d for operation in OPERATIONS for place, d in decisions(operation).items()}
    kinds: dict[str, dict[str, type]] = {}
    for (kernel, _), decision in known.items():
        for config in (decision.heuristic, *decision.others):
            kinds.setdefault(kernel, {})[type(config).__name__] = type(config)
    assert tuning.mismatch(content, content["device"]) is None
    entries = [
        (kernel, key, entry)
        for of_version in content["jax"].values()
        for kernel, shapes in of_version.items()
        for key, entry in shapes.items()
    ]
    assert entries
    for kernel, key, entry in entries:
        config = tuning.built(entry["config"], tuple(kinds[kernel].values()))
        if content["device"] == H200.kind and (kernel, key) in known:
            assert config != known[kernel, key].heuristic


def test_the_packages_entry_counts_for_its_version_alone(own_folder, monkeypatch):
    key = "batch=32 heads=32 widths=128x128 bfloat16"
    monkeypatch.setattr(tuning, "jax_version", lambda: "0.11")
    assert key in tuning.table(H200.kind)["delta_rule pass"]
    tuning.table.cache_clear()
    monkeypatch.setattr(tuning, "jax_version", lambda: "0.10")
    assert tuning.table(H200.kind) == {}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_users_entry_goes_before_the_heuristic(operation, own_folder):
    (kernel, key), decision = next(
        (place, d) for place, d in decisions(operation).items() if d.others
    )
    other = decision.others[0]
    write(own_folder, {kernel: {key: {"config": tuning.as_fields(other)}}})
    kinds = (type(other), type(decision.heuristic))

    def found(target: Target, key: str) -> Any:
        return tuning.decide(kernel, target, key, decision.heuristic, tuple, kinds)

    assert found(H200, key) == other
    assert found(H200, f"{key} and more") == decision.heuristic
    assert found(Target("gpu", "NVIDIA A100", 108, (8, 0)), key) == decision.heuristic


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"jax": {"0.1": {}, "0.2": {}}}, "it is for jax 0.1, 0.2, and this is 0."),
        ({"jax": "0.1"}, 'its "jax" is not entries by version'),
        ({"jax": {"0.1": {"rms_norm": {"k": 3}}}}, 'its "jax" is not entries by version'),
        ({"device": "NVIDIA A10"}, "its device is 'NVIDIA A10', and here it is 'NVIDIA H200'"),
        ({"format": 1}, "its format is 1, and here it is 2"),
    ],
)
def test_files_of_others_are_left_aside_with_a_word(own_folder, changes, words):
    write(own_folder, {"rms_norm": {"k": {}}}, **changes)
    with pytest.warns(tuning.TuningWarning, match=words) as caught:
        assert "rms_norm" not in tuning.table(H200.kind)
    assert "qwen-jax tune" in str(caught[0].message)


def test_a_broken_file_is_left_aside(own_folder):
    (own_folder / tuning.file_name(H200.kind)).write_text("{")
    with pytest.warns(tuning.TuningWarning, match="left aside"):
        tuning.table(H200.kind)


FIELDS = {"kind": "Config", "rows": 2, "num_warps": 4}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (None, "its config is None; accepted are the fields of Config"),
        ({}, "its config is {}; accepted are the fields of Config"),
        ({"kind": "Cut"}, "accepted are the fields of Config"),
        ({"kind": "Config", "size": 3}, "accepted are the fields rows, num_warps"),
        ({"kind": "Config", "rows": 2}, "accepted are the fields rows, num_warps"),
        (FIELDS | {"rows": "2"}, "its field rows is '2', which is no int"),
        (FIELDS | {"rows": 2.0}, "its field rows is 2.0, which is no int"),
        (FIELDS | {"num_warps": True}, "its field num_warps is True, which is no int"),
        (FIELDS | {"num_warps": {"rows": 2}}, "its field num_warps is {'rows': 2}, which"),
    ],
)
def test_a_meaningless_entry_is_an_error_that_names_the_file(own_folder, config, words):
    [(kernel, key), decision] = next(iter(decisions("rms_norm").items()))
    write(own_folder, {kernel: {key: {"config": FIELDS}}})
    assert tuning.decide(kernel, H200, key, decision.heuristic, tuple).rows == 2
    tuning.table.cache_clear()
    write(own_folder, {kernel: {key: {"config": config}}})
    with pytest.raises(tuning.TuningError, match=re.escape(words)) as caught:
        tuning.decide(kernel, H200, key, decision.heuristic, tuple)
    file = own_folder / tuning.file_name(H200.kind)
    assert str(caught.value).startswith(f"{file}: the entry of rms_norm for {key!r}")


def test_parts_of_an_entry_have_types_too():
    """Experts of few tokens have a cut for each of two launches."""
    config = next(
        d.heuristic
        for d in decisions("expert_dispatch").values()
        if type(d.heuristic).__name__ == "FewTokens"
    )
    fields = tuning.as_fields(config)
    for part, words in (
        ("two", "its config has 'two' for a Cut"),
        (fields["down"] | {"units": "64"}, "its field units is '64', which is no int"),
    ):
        with pytest.raises(tuning.TuningError, match=words):
            tuning.built(fields | {"down": part}, (type(config),))


def test_a_call_is_traced_again_with_what_is_tried(own_folder):
    run = importlib.import_module("pallas_kernels.rms_norm.api").OPERATION
    spec = importlib.import_module("pallas_kernels.rms_norm.specs").SPECS["8192 rows"]
    place, decision = next(
        (place, d) for place, d in decisions("rms_norm").items() if "rows=8192 " in place[1]
    )

    def warps() -> str:
        def call(*arrays: Any) -> Any:
            return run(*arrays, implementation="triton", **spec.settings())

        return lower_for_cuda(call, *spec.arguments())

    other = dataclasses.replace(decision.heuristic, num_warps=decision.heuristic.num_warps * 2)
    plain = warps()
    with tuning.trying({place: other}):
        tried = warps()
    assert f"num_warps = {other.num_warps}" in tried
    assert f"num_warps = {other.num_warps}" not in plain
    assert warps() == plain
