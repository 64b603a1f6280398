"""Damaged, hostile and odd model folders on the command line: refused in words, or converted."""

from __future__ import annotations

import json
import os
import shutil
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qwen_jax.checkpoint.mapping import Layout
from qwen_jax.config import QwenConfig
from tests.convert.sources import (
    BF16,
    FIELDS,
    INDEX,
    PER_EXPERT,
    Arrays,
    Shell,
    add_tensor,
    bits,
    read,
    tensors,
    write,
)

COMPOSITE = Layout("model.language_model.")
FIRST, SECOND = (f"model-{n:05}-of-00002.safetensors" for n in (1, 2))


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Shell:
    return Shell(capsys, tmp_path)


def edit_json(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


# --- Layouts that all hold the same model


LAYOUTS = {
    "composite": COMPOSITE,
    "outer language model": Layout("language_model.model.", "language_model."),
    "per expert": PER_EXPERT,
    "interleaved": Layout(linear_projections="interleaved"),
    "merged shared expert": Layout(shared_expert="merged", experts="per_expert"),
}


def test_every_layout_and_mixtures_give_the_same_files(shell, tmp_path):
    expected = bits(read(shell.convert(write(tmp_path / "plain"), name="expected")))
    for name, layout in LAYOUTS.items():
        source = write(tmp_path / name, tensors(layout))
        assert bits(read(shell.convert(source, name=f"native {name}"))) == expected
    mixed = {**tensors(COMPOSITE), **tensors()}
    mixed = {key: array for key, array in mixed.items() if ("layers.0" in key) == ("ge_m" in key)}
    mixed["model.norm.weight"] = mixed.pop("model.norm.weight", tensors()["model.norm.weight"])
    assert {key.partition("layers")[0] for key in mixed} >= {"model.", "model.language_model."}
    source = write(tmp_path / "mixed", mixed)
    assert bits(read(shell.convert(source, name="native mixed"))) == expected


def test_the_mtp_head_comes_in_two_layouts_or_not_at_all(shell, tmp_path):
    expected = bits(read(shell.convert(write(tmp_path / "none"), name="native none")))
    found = []
    for experts in ("fused", "per_expert"):
        layout = Layout(mtp_experts=experts)
        source = write(tmp_path / experts, tensors(layout, 1), mtp_num_hidden_layers=1)
        native = shell.convert(source, name=f"native {experts}")
        found.append(bits(read(native)))
        again = shell.convert(native, name=f"again {experts}")
        assert bits(read(again)) == found[-1]
        assert (again / "config.json").read_text() == (native / "config.json").read_text()
        text = shell.convert(source, "--drop-mtp", name=f"text {experts}")
        assert bits(read(text)) == expected
        assert QwenConfig.from_hf(text).mtp_num_hidden_layers == 0
    assert found[0] == found[1]
    assert found[0].items() > expected.items()


@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings:UserWarning")
@pytest.mark.parametrize("outer", [True, False])
@pytest.mark.parametrize("inner", [True, False])
def test_an_output_head_of_its_own_wins_over_tie_word_embeddings(shell, tmp_path, outer, inner):
    source = write(tmp_path / "source", tensors(COMPOSITE))
    config = {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "tie_word_embeddings": outer,
        "text_config": FIELDS | {"tie_word_embeddings": inner},
    }
    (source / "config.json").write_text(json.dumps(config))
    native = shell.convert(source)
    head = "lm_head.weight"
    assert read(native)[head].tobytes() == tensors()[head].tobytes()
    written = json.loads((native / "config.json").read_text())
    assert written["tie_word_embeddings"] is False
    assert written["architectures"] == ["Qwen3_5MoeForCausalLM"]


def test_a_tied_model_has_no_head_and_an_untied_one_needs_it(shell, tmp_path):
    arrays = tensors(tie_word_embeddings=True)
    tied = write(tmp_path / "tied", arrays, tie_word_embeddings=True)
    assert bits(read(shell.convert(tied))) == bits(arrays)
    shell.refused(write(tmp_path / "untied", arrays), "missing (1)", "lm_head.weight")


ROPE = {
    "at the top": {"rope_theta": 1e6, "partial_rotary_factor": 0.25},
    "no scaling": {"rope_theta": 1e6, "partial_rotary_factor": 0.25, "rope_scaling": None},
    "inside": {
        "rope_theta": None,
        "partial_rotary_factor": None,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e6,
            "partial_rotary_factor": 0.25,
        },
    },
    "null inside": {"rope_theta": 1e6, "partial_rotary_factor": 0.25, "rope_parameters": None},
}


@pytest.mark.parametrize("composite", [False, True])
def test_every_spelling_of_rotary_fields_is_carried_over(shell, tmp_path, composite):
    found = []
    for name, fields in ROPE.items():
        source = write(tmp_path / name, tensors(COMPOSITE), **fields)
        if composite:
            config = {"model_type": "qwen3_5_moe", "text_config": FIELDS | fields}
            (source / "config.json").write_text(json.dumps(config))
        found.append(QwenConfig.from_hf(shell.convert(source, name=f"native {name}")))
        assert found[-1] == QwenConfig.from_hf(source)
    assert all(config == found[0] for config in found)
    assert found[0].rope_parameters.rope_theta == 1e6


def test_pruned_release_with_odd_fields(shell, tmp_path):
    """Per expert under a composite prefix, flat configuration, an MTP head that is not there."""
    arrays = tensors(Layout("model.language_model.", experts="per_expert"))
    source = write(tmp_path / "pruned", arrays, mtp_num_hidden_layers=1, pad_token_id=None)
    native = shell.convert(source)
    assert bits(read(native)) == bits(tensors())
    assert shell.run("diff", source, native).code == 0


def test_the_source_is_only_read(shell, tmp_path):
    source = write(tmp_path / "source", tensors(PER_EXPERT), shards=2)
    (source / "tokenizer.json").write_text("{}")
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in source.iterdir()}
    for path in (*source.iterdir(), source):
        path.chmod(0o555 if path.is_dir() else 0o444)
    first, second = (shell.convert(source, name=name) for name in ("first", "second"))
    assert before == {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in source.iterdir()}
    assert {p.name: p.read_bytes() for p in first.iterdir()} == {
        p.name: p.read_bytes() for p in second.iterdir()
    }
    (first / "tokenizer.json").write_text("changed")  # the copy may be written to
    source.chmod(0o755)


# --- Folders that are refused


def test_tensors_in_two_layouts_at_once(shell, tmp_path):
    one = "model.layers.0.mlp.experts.0.up_proj.weight"
    arrays = tensors() | {one: tensors(PER_EXPERT)[one]}
    shell.refused(write(tmp_path / "source", arrays), "ambiguous (1)", "gate_up_proj", one)
    twice = tensors() | {"model.language_model.norm.weight": np.zeros(16, BF16)}
    shell.refused(write(tmp_path / "twice", twice), "duplicate (1)", "model.norm.weight")


def test_tensors_that_are_missing_or_of_no_use(shell, tmp_path):
    arrays = tensors()
    for key in ("shared_expert_gate.weight", "experts.down_proj"):
        del arrays[f"model.layers.1.mlp.{key}"]
    arrays["model.layers.1.mlp.shared_expert_gate.bias"] = np.zeros(1, BF16)
    arrays["transformer.wte.weight"] = np.zeros((2, 2), BF16)
    arrays["model.layers.0.input_layernorm.weight"] = np.zeros(17, BF16)
    arrays["model.layers.0.mlp.gate.weight"] = np.zeros((4, 16), np.float64)
    shell.refused(
        write(tmp_path / "source", arrays),
        "missing (2)",
        "model.layers.1.mlp.shared_expert_gate.weight",
        "misshapen (1)",
        "dtype (1)",
        "model.layers.0.mlp.gate.weight is F64",
        "under an unknown prefix (1)",
        "unused (1)",
    )


def test_shards_that_are_missing_or_cut_short(shell, tmp_path):
    source = write(tmp_path / "source", shards=2)
    (source / SECOND).unlink()
    count = len(tensors())
    shell.refused(source, f"{SECOND}, which holds {count // 2} of {count} tensors: missing")
    (source / SECOND).write_bytes((source / FIRST).read_bytes()[:-1])
    shell.refused(source, "unreadable (1)", SECOND, "truncated")
    (source / SECOND).unlink()
    (source / SECOND).symlink_to("nowhere")
    shell.refused(source, "a symbolic link that leads nowhere")


def test_links_are_followed_and_strays_ignored(shell, tmp_path):
    source = write(tmp_path / "source", shards=2)
    outside = tmp_path / "blob"
    (source / FIRST).rename(outside)
    (source / FIRST).symlink_to(outside)
    (tmp_path / "template").write_text("{{ messages }}")
    (source / "chat_template.jinja").symlink_to(tmp_path / "template")
    write(tmp_path / "other", {"model.norm.weight": np.ones(16, BF16)})
    (tmp_path / "other" / "model.safetensors").rename(source / "model.safetensors")
    assert "ignored files" in shell.run("convert", source, "--dry-run").out
    native = shell.convert(source)
    assert bits(read(native)) == bits(tensors())
    assert not (native / "chat_template.jinja").is_symlink()
    assert not [path for path in native.iterdir() if path.is_symlink()]


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("../other/x.safetensors", "refused paths (1)"),
        ("/etc/x.safetensors", "refused paths (1)"),
        ("sub/../../x.safetensors", "refused paths (1)"),
        ("a\u202eb.safetensors", "refused paths (1)"),
        (5, "refused paths (1)"),
        ("x" * 300 + ".safetensors", "File name too long"),
        ("\ud800.safetensors", "refused paths (1)"),
    ],
)
def test_index_that_leads_elsewhere(shell, tmp_path, place, words):
    source = write(tmp_path / "source", shards=2)
    edit_json(source / INDEX, lambda index: index["weight_map"].update({"lm_head.weight": place}))
    shell.refused(source, words)


@pytest.mark.parametrize("make", [os.mkdir, lambda path: os.symlink("nowhere", path)])
def test_index_that_is_no_file_is_not_taken_for_none(shell, tmp_path, make):
    source = write(tmp_path / "source")
    make(source / INDEX)
    shell.refused(source, INDEX, "cannot be read")


def test_header_that_claims_more_than_there_is(shell, tmp_path):
    source = write(tmp_path / "source")
    file = source / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(struct.pack("<Q", 2**62) + content[8:])
    shell.refused(source, "header length 4611686018427387904 does not fit")
    (length,) = struct.unpack("<Q", content[:8])
    padded = struct.pack("<Q", length + 64) + content[8 : 8 + length] + b" " * 64
    file.write_bytes(padded + content[8 + length :])
    assert bits(read(shell.convert(source))) == bits(tensors())


def test_shape_of_millions_of_factors_is_refused_at_once(shell, tmp_path):
    source = write(tmp_path / "source")
    add_tensor(source, "x", "F32", [2] * 100_000, 4)
    shell.refused(source, "tensor x has shape", "= too many bytes")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_hidden_layers": 10**5, "layer_types": None}, "num_hidden_layers is 100000"),
        ({"num_experts": 10**12}, "num_experts is 1000000000000"),
        ({"mtp_num_hidden_layers": 10**9}, "mtp_num_hidden_layers is 1000000000"),
        ({"vocab_size": 10**15}, "misshapen (2)"),
        ({"model_type": "llama"}, "llama"),
        ({"quantization_config": 3}, "quantization_config is 3"),
        ({"num_experts": None}, "num_experts"),
    ],
)
def test_configurations_that_cannot_be(shell, tmp_path, fields, words):
    shell.refused(write(tmp_path / "source", tensors(PER_EXPERT), **fields), words)


def test_folders_of_other_programs(shell, tmp_path):
    (tmp_path / "gguf").mkdir()
    (tmp_path / "gguf" / "model.gguf").write_bytes(b"GGUF")
    shell.refused(tmp_path / "gguf", "GGUF")
    mlx = write(tmp_path / "mlx", quantization={"group_size": 64, "bits": 8, "mode": "affine"})
    shell.refused(mlx, "quantised weights (MLX)")
    (mlx / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid\n")
    shell.refused(mlx, "git lfs pull")


def test_shards_of_another_version_of_the_native_format(shell, tmp_path):
    native = shell.convert(write(tmp_path / "source"))
    (file,) = native.glob("*.safetensors")
    file.write_bytes(file.read_bytes().replace(b'version":"1"', b'version":"2"'))
    shell.refused(native, "qwen_jax_format_version is 2; this program reads 1")


# --- The vision tower


@pytest.mark.parametrize(
    ("dtype", "shape", "nbytes", "words"),
    [
        ("F4", [2, 4], 4, "has dtype F4; dtypes that can be read are"),
        ("F32", [1] * 70, 4, "maximum supported dimension"),
        ("F32", [0, 2**40, 2**23], 0, "has shape [0, 1099511627776, 8388608]"),
    ],
)
def test_vision_tensors_that_numpy_cannot_hold(shell, tmp_path, dtype, shape, nbytes, words):
    source = write(tmp_path / "source")
    add_tensor(source, "model.visual.x", dtype, shape, nbytes)
    shell.refused(source, words, "model.visual.x", options=("--keep-visual",))
    shell.refused(source, words, verb="export")
    assert words in shell.run("diff", source, source).err
    record = json.loads((shell.convert(source) / "conversion.json").read_text())
    assert record["skipped"] == {"visual": 1}


def test_vision_tensors_of_any_other_kind_are_kept_and_compared(shell, tmp_path):
    kinds: Arrays = {
        "model.visual.scalar": np.float32(2),
        "model.visual.empty": np.zeros((0, 3), np.float32),
        "model.visual.wide": np.float64([1, 2]),
        "model.visual.count": np.int64([1, 2]),
        "visual.count": np.array([True]),
    }
    source = write(tmp_path / "source", tensors() | kinds)
    native = shell.convert(source, "--keep-visual")
    assert bits(read(native)) == bits(tensors() | kinds)
    assert shell.run("diff", source, native).code == 0
    changed = kinds | {
        "model.visual.wide": np.float64([1, 2 + 1e-12]),
        "model.visual.count": np.int64([1, 2**40]),
        "visual.\x1b[2J": np.float32([1]),
    }
    other = write(tmp_path / "other", tensors() | changed)
    outcome = shell.run("diff", source, other)
    assert outcome.code == 1
    assert "visual.wide: 1 values differ, by at most 1e-12" in outcome.out
    assert "model.visual.count: 1 values differ" in outcome.out
    assert r"'visual.\x1b[2J': only in the second" in outcome.out
    assert "\x1b" not in outcome.out


# --- Side files


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (os.mkdir, "not a regular file"),
        (os.mkfifo, "not a regular file"),
        (lambda path: os.symlink("nowhere", path), "a link that leads nowhere"),
        (lambda path: os.symlink(path, path), "a link that leads nowhere"),
    ],
)
def test_side_files_that_are_no_files(shell, tmp_path, make, kind):
    source = write(tmp_path / "source")
    make(source / "tokenizer.json")
    shell.refused(source, f"tokenizer.json: {kind}")
    shell.refused(source, f"tokenizer.json: {kind}", verb="export")


def test_names_of_side_files_cannot_steer_a_terminal(shell, tmp_path):
    source = write(tmp_path / "source")
    names = [b"line\nfeed\x1b[2J.txt", b"not \xff UTF-8.md", b"\x1b[2J.bin"]
    for name in names:
        Path(os.fsdecode(os.fsencode(source) + b"/" + name)).write_text("content")
    for options in ((), ("--json",)):
        outcome = shell.run("convert", source, "--dry-run", *options)
        assert outcome.code == 0
        assert "\x1b" not in outcome.out
        assert "\udcff" not in outcome.out
        assert "line\nfeed" not in outcome.out
    native = shell.convert(source)
    assert set(names[:2]) < set(os.listdir(os.fsencode(native)))


def test_what_stays_behind_is_listed(shell, tmp_path):
    source = write(tmp_path / "source")
    (source / "original").mkdir()
    (source / "original" / "params.json").write_text("{}")
    for name in ("training_args.bin", "LICENSE", "merges.txt", ".gitattributes", "a.index.json"):
        (source / name).write_text(name)
    report = json.loads(shell.run("convert", source, "--dry-run", "--json").out)
    assert report["side_files"] == ["LICENSE", "merges.txt"]
    assert report["files_left"] == ["a.index.json", "original/", "training_args.bin"]


def test_a_long_side_file_takes_little_memory_and_needs_room(shell, tmp_path, monkeypatch):
    source = write(tmp_path / "source")
    with (source / "notes.txt").open("wb") as stream:
        stream.truncate(64 << 20)
    free = shutil.disk_usage(tmp_path)._replace(free=100 << 20)
    monkeypatch.setattr("shutil.disk_usage", lambda path: free)
    tracemalloc.start()
    try:
        shell.refused(source, "0.10 GB free; 0.07 GB are still to be written")
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


ODD = {"name": "a\ud800é", "text_config": None}


def test_config_with_text_that_utf8_cannot_hold(shell, tmp_path):
    source = write(tmp_path / "source")
    edit_json(source / "config.json", lambda config: config.update(ODD))
    native = shell.convert(source, "--drop-mtp")
    assert json.loads((native / "config.json").read_bytes())["name"] == ODD["name"]
