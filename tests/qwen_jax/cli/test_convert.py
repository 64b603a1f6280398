"""`convert` and `export` as a person uses them: what they print, write and return."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import convert.run
from convert.__main__ import main as convert_main
from qwen_jax.checkpoint.mapping import Layout
from tests.convert.sources import PER_EXPERT, bits, read, tensors, write
from tests.qwen_jax.fake_hub import put

USAGE, FAILURE, INTERRUPTED = 2, 1, 130
COMPOSITE = Layout("model.language_model.")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Experts one by one, a vision tower, an MTP head, and files beside the weights."""
    arrays = tensors(PER_EXPERT, 1)
    arrays["model.visual.norm.weight"] = np.ones(3, np.float32)
    folder = write(tmp_path / "source", arrays, shards=2, mtp_num_hidden_layers=1)
    (folder / "merges.txt").write_text("a b")
    (folder / "notes.bin").write_bytes(b"?")
    return folder


@pytest.fixture
def native(run, source: Path, tmp_path: Path) -> Path:
    assert run("convert", str(source), str(tmp_path / "native"), "--quiet").code == 0
    return tmp_path / "native"


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# --- The plan


def test_dry_run_says_what_would_be_done_and_does_nothing(run, source, tmp_path):
    before = names(tmp_path)
    outcome = run("convert", str(source), str(tmp_path / "native"), "--dry-run")
    assert (outcome.code, outcome.err) == (0, "")
    assert names(tmp_path) == before
    plan = {line.split("  ")[0]: line for line in outcome.out.splitlines()}
    count = len(tensors(PER_EXPERT, 1)) + 1
    nbytes = sum(array.nbytes for array in read(source).values())
    assert f"{source}: qwen3_5_moe_text, {count} tensors, {nbytes / 1000:.1f} kB" in plan["source"]
    assert (
        f"{len(tensors(mtp=1))} tensors, {(nbytes - 12) / 1000:.1f} kB, native"
        in (plan["to write"])
    )
    assert "tensors of the model, with the MTP head" in plan["matched"]
    assert "1 x visual" in plan["left out"]
    assert plan["side files"].endswith("merges.txt")
    assert plan["files left"].endswith("notes.bin")
    assert plan.keys() >= {"memory", "time"}
    assert run("convert", str(source), "--dry-run").out == outcome.out


def test_dry_run_as_json(run, source):
    outcome = run("convert", str(source), "--dry-run", "--json", "--drop-mtp", "--keep-visual")
    assert (outcome.code, outcome.err) == (0, "")
    plan = json.loads(outcome.out)
    written = tensors()
    assert plan["source"] == str(source)
    assert plan["format"] == "native"
    assert plan["tensors_in"] == len(read(source))
    assert plan["tensors_out"] == len(written) + 1
    assert plan["bytes_in"] == sum(array.nbytes for array in read(source).values())
    assert plan["bytes_out"] == sum(array.nbytes for array in written.values()) + 12
    assert plan["skipped"] == {"mtp": len(tensors(PER_EXPERT, 1)) - len(tensors(PER_EXPERT))}
    assert plan["layout"]["experts"] == "per_expert"
    assert plan["side_files"] == ["merges.txt"]
    assert plan["files_left"] == ["notes.bin"]
    assert plan["peak_memory_bytes"] > 0 < plan["seconds"]


def test_options_that_find_nothing_to_act_on_are_told(run, tmp_path):
    plan = run("convert", str(write(tmp_path / "text")), "--dry-run", "--keep-visual", "--drop-mtp")
    assert plan.code == 0
    assert "no vision tower to keep; there is no MTP head to leave out" in plan.out


# --- Writing


def test_plan_and_result_go_to_their_streams(run, source, tmp_path):
    plan = run("convert", str(source), "--dry-run").out
    destination = tmp_path / "new" / "folder" / "native"
    outcome = run("convert", str(source), str(destination))
    assert outcome.code == 0
    assert outcome.err == plan
    assert outcome.out.startswith(f"{destination}: {len(tensors(mtp=1))} tensors, ")
    assert outcome.out.count("\n") == 1
    quiet = run("convert", str(source), str(tmp_path / "quiet"), "--quiet")
    assert (quiet.code, quiet.err) == (0, "")
    assert bits(read(destination)) == bits(tensors(mtp=1)) == bits(read(tmp_path / "quiet"))


def test_result_as_json(run, source, tmp_path):
    outcome = run("convert", str(source), str(tmp_path / "native"), "--json", "-q")
    report = json.loads(outcome.out)
    assert (outcome.code, outcome.err) == (0, "")
    assert report["destination"] == str(tmp_path / "native")
    assert 0 < report["seconds"] < 60
    assert "verified" not in report


@pytest.mark.parametrize(("limit", "files"), [("1KiB", 10), ("1GB", 1), ("0.004MB", 5)])
def test_size_of_shards(run, source, tmp_path, limit, files):
    destination = tmp_path / "native"
    assert run("convert", str(source), str(destination), "--max-shard-size", limit).code == 0
    shards = sorted(destination.glob("*.safetensors"))
    assert len(shards) >= files if files > 1 else len(shards) == 1
    assert shards[0].name == f"model-00001-of-{len(shards):05}.safetensors"
    assert bits(read(destination)) == bits(tensors(mtp=1))
    largest = max(array.nbytes for array in tensors(mtp=1).values())
    nbytes = {"1KiB": 1024, "1GB": 10**9, "0.004MB": 4000}[limit]
    for shard in shards:
        assert sum(array.nbytes for array in load_file(shard).values()) <= max(nbytes, largest)


def test_interrupted_run_goes_on_with_resume(run, source, tmp_path, monkeypatch):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    arguments = (str(source), str(tmp_path / "native"), "--max-shard-size", "4kB")
    with monkeypatch.context() as patch:
        patch.setattr(convert.run, "copy_side_files", interrupt)
        outcome = run("convert", *arguments)
    assert (outcome.code, outcome.out) == (INTERRUPTED, "")
    assert "the same command with --resume goes on" in outcome.err
    assert names(tmp_path) == {"source", "native.partial"}
    unfinished = names(tmp_path / "native.partial")
    assert not unfinished & {"config.json", "model.safetensors.index.json"}
    refused = run("convert", *arguments, "-q")
    assert (refused.code, refused.out) == (FAILURE, "")
    assert "native.partial exists, left by a run that did not finish" in refused.err
    other = run("convert", *arguments[:2], "--max-shard-size", "5kB", "--resume", "-q")
    assert other.code == FAILURE
    assert "max_shard_bytes: 4000 then, 5000 now" in other.err
    assert run("convert", *arguments, "--resume").code == 0
    assert names(tmp_path) == {"source", "native"}
    assert bits(read(tmp_path / "native")) == bits(tensors(mtp=1))
    done = run("convert", *arguments, "--resume", "-q")
    assert (done.code, done.err) == (0, "")
    assert "complete already" in done.out


def test_resume_where_nothing_was_begun_says_so(run, source, tmp_path):
    outcome = run("convert", str(source), str(tmp_path / "native"), "--resume")
    assert outcome.code == 0
    assert "there was nothing to continue" in outcome.err


def test_module_is_the_same_program(source, tmp_path, monkeypatch, capsys):
    arguments = ["convert", str(source), str(tmp_path / "native"), "--quiet"]
    monkeypatch.setattr(sys, "argv", arguments)
    assert convert_main() == 0
    assert "native: " in capsys.readouterr().out
    assert convert_main() == FAILURE


# --- What is refused


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("SOURCE",), USAGE, ("no destination", "--dry-run", "--verify")),
        (("SOURCE", ""), USAGE, ("destination is empty",)),
        (("demo", "SOURCE"), FAILURE, ("exists and holds", "Nothing is ever overwritten")),
        (("SOURCE", "SOURCE"), FAILURE, ("is the source or inside it",)),
        (("SOURCE", "SOURCE/in"), FAILURE, ("is the source or inside it",)),
        (("demo", "SOURCE/merges.txt"), FAILURE, ("is a file",)),
        (("demo", "SOURCE/merges.txt/in"), FAILURE, ("is not a folder",)),
        (("", "NEW"), USAGE, ("source is empty",)),
        (("SOURCE/merges.txt", "NEW"), FAILURE, ("merges.txt is a file",)),
        (("NOWHERE", "NEW"), FAILURE, ("NOWHERE does not exist",)),
        (("SOURCE", "NEW", "--max-shard-size", "0"), USAGE, ("--max-shard-size is '0'",)),
        (("SOURCE", "NEW", "--max-shard-size", ""), USAGE, ("--max-shard-size is ''",)),
        (("SOURCE", "NEW", "--max-shard-size", "4XB"), USAGE, ("'4XB'",)),
        (("SOURCE", "NEW", "--revision", "main"), USAGE, ("not on the Hub",)),
        (("SOURCE", "NEW", "--adapter", "SOURCE"), FAILURE, ("no adapter_config.json",)),
        (("SOURCE", "NEW", "--add-tokens", "NOWHERE"), FAILURE, ("NOWHERE cannot be read",)),
        (("SOURCE", "NEW", "--add-tokens", "SOURCE"), FAILURE, ("cannot be read",)),
        (("SOURCE", "--dry-run", "--resume"), USAGE, ("--resume", "no effect")),
        (("SOURCE", "--verify"), USAGE, ("has no conversion.json",)),
        (
            ("SOURCE", "--verify", "--drop-mtp", "--adapter", "x", "--max-shard-size", "1GB"),
            USAGE,
            ("--drop-mtp, --adapter, --max-shard-size", "no effect"),
        ),
        (("SOURCE", "NEW", "--no-such-flag"), USAGE, ("--no-such-flag",)),
        (("SOURCE", "NEW", "stray"), USAGE, ("stray",)),
    ],
)
def test_wrong_arguments(run, source, tmp_path, arguments, code, words):
    before = names(tmp_path)
    places = {"SOURCE": source, "NEW": tmp_path / "new", "NOWHERE": tmp_path / "NOWHERE"}
    given = [
        str(places[word]) + argument[len(word) :]
        if (word := argument.partition("/")[0]) in places
        else argument
        for argument in arguments
    ]
    outcome = run("convert", *given)
    assert (outcome.code, outcome.out) == (code, "")
    assert outcome.err.startswith("error: ")
    assert [word for word in words if word not in outcome.err] == []
    assert names(tmp_path) == before
    assert names(source) >= {"config.json", "merges.txt"}


@pytest.mark.parametrize("verb", ["export", "diff"])
def test_missing_arguments(run, source, verb):
    outcome = run(verb, str(source))
    assert (outcome.code, outcome.out) == (USAGE, "")
    assert f"qwen-jax {verb} --help" in outcome.err


def test_export_refuses_what_convert_does(run, source, tmp_path):
    refused = run("export", str(source), str(tmp_path / "new"), "--experts", "both")
    assert (refused.code, refused.out) == (USAGE, "")
    assert "per-expert" in refused.err
    assert run("export", str(source), str(source)).code == FAILURE
    assert run("export", str(source), str(tmp_path / "new"), "--max-shard-size", "x").code == USAGE


# --- Checking


def flip(folder: Path) -> None:
    file = next(folder.glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def cut(folder: Path) -> None:
    file = next(folder.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])


def lose_shard(folder: Path) -> None:
    next(folder.glob("*.safetensors")).unlink()


def forget(folder: Path) -> None:
    record = json.loads((folder / "conversion.json").read_text())
    del record["checksums"]["model.norm.weight"]
    (folder / "conversion.json").write_text(json.dumps(record))


def spoil_record(folder: Path) -> None:
    (folder / "conversion.json").write_text("{")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (flip, ("tensors that are not as they were written (1)", ": different", "convert again")),
        (cut, ("truncated",)),
        (lose_shard, ("missing", "model-00001-of-00001.safetensors")),
        (forget, ("model.norm.weight: extra",)),
        (spoil_record, ("conversion.json cannot be read",)),
    ],
)
def test_damage_to_a_native_folder_is_found(run, native, damage, words):
    damage(native)
    outcome = run("convert", str(native), "--verify", "--json")
    assert (outcome.code, outcome.out) == (FAILURE, "")
    assert [word for word in words if word not in outcome.err] == []


def test_good_folders_are_verified(run, tiny, tmp_path):
    native = tmp_path / "native"
    outcome = run("convert", tiny, str(native), "--verify", "--quiet")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.endswith(", verified\n")
    arrays = read(native)
    outcome = run("convert", str(native), "--verify")
    assert outcome == (0, f"{native}: {len(arrays)} tensors, verified\n", "")
    outcome = run("convert", str(native), "--verify", "--json", "-q")
    assert json.loads(outcome.out)["verified"] is True
    key = "layers.0.self_attn.o_proj.weight"
    arrays[f"model.{key}"][3] = np.nan
    shutil.copytree(tiny, tmp_path / "spoilt")
    save_file(arrays, tmp_path / "spoilt" / "model.safetensors")
    spoilt = str(tmp_path / "spoilt")
    outcome = run("convert", spoilt, str(tmp_path / "out"), "--verify", "--quiet")
    assert (outcome.code, outcome.out) == (FAILURE, "")
    assert "layer 0 (full_attention): the output is not finite from token 0 on" in outcome.err
    assert f"not finite themselves: {key}. Check the source" in outcome.err
    assert read(tmp_path / "out").keys() == arrays.keys()


# --- Export


@pytest.mark.parametrize(
    ("experts", "layout"),
    [
        ("source", PER_EXPERT),
        ("fused", Layout()),
        ("per-expert", PER_EXPERT),
    ],
)
def test_export_layouts(run, native, tmp_path, experts, layout):
    destination = tmp_path / "exported"
    outcome = run("export", str(native), str(destination), "--experts", experts, "--json", "-q")
    report = json.loads(outcome.out)
    assert (outcome.code, outcome.err, report["format"]) == (0, "", "hugging face")
    assert report["layout"]["experts"] == report["layout"]["mtp_experts"] == layout.experts
    assert bits(read(destination)) == bits(tensors(layout, 1))
    assert names(destination) == {
        "config.json",
        "merges.txt",
        "model-00001-of-00001.safetensors",
        "model.safetensors.index.json",
    }
    index = json.loads((destination / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == tensors(layout, 1).keys()
    assert run("diff", str(native), str(destination)).code == 0


def test_export_of_the_whole_release(run, tmp_path):
    arrays = tensors(COMPOSITE)
    arrays["model.visual.norm.weight"] = np.ones(3, np.float32)
    source = write(tmp_path / "source", arrays)
    native, exported = str(tmp_path / "native"), tmp_path / "exported"
    assert run("convert", str(source), native, "--keep-visual").code == 0
    plan = run("export", native, str(exported), "--dry-run").out
    assert "Hugging Face layout" in plan
    assert not exported.exists()
    assert run("export", native, str(exported)).code == 0
    assert bits(read(exported)) == bits(arrays)


# --- Changes on the way


def test_adapter_and_added_tokens_together(run, demo_path, tmp_path):
    """New rows are means of the rows that the adapter has changed."""
    arrays = tensors(vocab_size=4096)
    source = write(tmp_path / "source", arrays, vocab_size=4096)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_path / name, source)
    module = "base_model.model.model.layers.1.self_attn.o_proj"
    embedding = np.arange(4096 * 16, dtype=np.float32).reshape(4096, 16) % 64
    adapter = {
        f"{module}.lora_A.weight": np.eye(2, 16, dtype=np.float32),
        f"{module}.lora_B.weight": np.eye(16, 2, dtype=np.float32),
        "base_model.model.model.embed_tokens.weight": embedding,
    }
    (tmp_path / "adapter").mkdir()
    save_file(adapter, tmp_path / "adapter" / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "r": 2,
        "lora_alpha": 4,
        "target_modules": ["o_proj"],
        "modules_to_save": ["embed_tokens"],
    }
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(settings))
    entry = {"token": "Nebuchadnezzar", "pieces": [8, 11], "weights": [1, 3]}
    (tmp_path / "tokens.json").write_text(json.dumps([entry]))
    options = (
        "--adapter", str(tmp_path / "adapter"), "--add-tokens", str(tmp_path / "tokens.json"),
    )  # fmt: skip
    plan = run("convert", str(source), "--dry-run", *options).out
    assert "merged        adapter: " in plan
    assert "added tokens  1" in plan
    native = tmp_path / "native"
    outcome = run("convert", str(source), str(native), *options, "--quiet")
    assert (outcome.code, outcome.err) == (0, "")
    found = read(native)
    table, head = found["model.embed_tokens.weight"], found["lm_head.weight"]
    row = next(i for i in range(len(table)) if i >= 4096 or (table[i] != embedding[i]).any())
    np.testing.assert_array_equal(table[row], (embedding[8] + 3 * embedding[11]) / 4)
    old = arrays["lm_head.weight"].astype(np.float32)
    np.testing.assert_allclose(head[row], (old[8] + 3 * old[11]) / 4, rtol=2**-8)
    weight = arrays["model.layers.1.self_attn.o_proj.weight"].astype(np.float32)
    update = 2 * np.eye(16, 2) @ np.eye(2, 16)
    np.testing.assert_allclose(
        found["model.layers.1.self_attn.o_proj.weight"].astype(np.float32),
        weight + update,
        rtol=2**-8,
    )
    record = json.loads((native / "conversion.json").read_text())
    assert (record["added_tokens"], len(record["adapters"])) == (1, 1)
    again = run("convert", str(native), str(tmp_path / "again"), "--json", "-q")
    assert json.loads(again.out)["adapters"] == []  # of this run
    kept = json.loads((tmp_path / "again" / "conversion.json").read_text())
    assert kept["adapters"] == record["adapters"]


# --- The Hub


@pytest.fixture
def cached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: Path) -> Callable[..., Path]:
    """A cache with a whole model, org/whole, and one without weights, org/side. No network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    files = {path.name: path.read_bytes() for path in source.iterdir()}
    put(tmp_path / "cache", "org/side", {"config.json": files["config.json"]})
    put(tmp_path / "cache", "org/whole", files, ref="v1")
    packed = json.loads(files["config.json"]) | {"quantization_config": {"quant_method": "quark"}}
    put(tmp_path / "cache", "org/quark", {"config.json": json.dumps(packed).encode()})
    return lambda name: tmp_path / name


def test_hub_ids(run, source, cached):
    native, exported = str(cached("native")), str(cached("exported"))
    outcome = run("convert", "org/whole", native, "--revision", "v1")
    assert outcome.code == 0
    assert outcome.err.startswith("org/whole: fetching from the Hub what is not cached\n")
    assert not [path for path in Path(native).iterdir() if path.is_symlink()]
    assert bits(read(Path(native))) == bits(tensors(mtp=1))
    assert run("export", "org/whole", exported, "--revision", "v1", "-q").err == ""
    assert run("diff", native, exported, "-q").code == 0


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("org/none", "NEW"), FAILURE, "hf download org/none"),
        (("org/side", "NEW"), FAILURE, "org/side has no safetensors weights"),
        (("org/quark", "NEW"), FAILURE, "holds quantised weights (quark), which are not read"),
        (("org/whole", "NEW", "--revision", "v2"), FAILURE, "org/whole at revision v2"),
        (("org/whole", "NEW", "--revision="), USAGE, "revision is empty"),
        (("org/none", "NEW", "--max-shard-size", "many"), USAGE, "--max-shard-size is 'many'"),
        (("org/none", "SOURCE"), FAILURE, "Nothing is ever overwritten"),
        (("org/none", "--verify", "--keep-visual"), USAGE, "--keep-visual"),
    ],
)
def test_hub_ids_that_are_refused(run, source, cached, arguments, code, words):
    """What is wrong with the other arguments is said before anything is fetched."""
    places = {"NEW": str(cached("new")), "SOURCE": str(source)}
    outcome = run("convert", *(places.get(argument, argument) for argument in arguments), "-q")
    assert (outcome.code, outcome.out) == (code, "")
    assert words in outcome.err
    assert not cached("new").exists()
