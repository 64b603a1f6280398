"""Sources that change while they are converted, and two conversions at once."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import convert.run
from qwen_jax.checkpoint.safetensors_io import TensorFolder
from tests.convert.sources import Outcome, Shell, bits, read, tensors, write

CHANGED = "changed while the conversion was going on"


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Shell:
    return Shell(capsys, tmp_path)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = write(tmp_path / "source", shards=2)
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


@pytest.fixture
def at_the_end(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """Has something done once, when all tensors are written and side files are copied."""

    def have(action: Callable[[], object]) -> None:
        copy = convert.run.copy_side_files

        def copy_then_act(*arguments: object) -> None:
            copy(*arguments)
            monkeypatch.setattr(convert.run, "copy_side_files", copy)
            action()

        monkeypatch.setattr(convert.run, "copy_side_files", copy_then_act)

    return have


def unfinished(outcome: Outcome, destination: Path, *words: str) -> None:
    """A run failed in words, and left nothing that loads."""
    assert (outcome.code, outcome.out) == (1, "")
    assert [word for word in words if word not in outcome.err] == []
    assert not destination.exists()
    assert not (Path(f"{destination}.partial") / "config.json").exists()


def shard(source: Path, number: int = 1) -> Path:
    return source / f"model-{number:05}-of-00002.safetensors"


def overwrite(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def replace(file: Path) -> None:
    copy = file.with_suffix(".new")
    copy.write_bytes(file.read_bytes())
    os.utime(copy, ns=(0, 0))
    os.replace(copy, file)


@pytest.mark.parametrize("change", [overwrite, replace])
def test_shard_that_changes(shell, source, at_the_end, change):
    at_the_end(lambda: change(shard(source)))
    destination = shell.place / "native"
    outcome = shell.run("convert", source, destination, "--quiet")
    unfinished(outcome, destination, f"{shard(source).name} {CHANGED}")
    again = shell.run("convert", source, destination, "--quiet", "--resume")
    unfinished(again, destination, "was begun by another run", shard(source).name)
    assert shell.run("convert", source, destination).code == 1
    assert bits(read(shell.convert(source, name="elsewhere"))).keys() == tensors().keys()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda source: shard(source, 2).unlink(), "No such file"),
        (lambda source: (source / "config.json").write_text("{}"), f"config.json {CHANGED}"),
        (
            lambda source: (source / "tokenizer_config.json").write_text("[]"),
            f"tokenizer_config.json {CHANGED}",
        ),
    ],
)
def test_other_files_that_change(shell, source, at_the_end, change, words):
    at_the_end(lambda: change(source))
    destination = shell.place / "exported"
    unfinished(shell.run("export", source, destination, "--quiet"), destination, words)


def test_side_file_that_is_gone_before_it_is_copied(shell, source, monkeypatch):
    read_tensor = TensorFolder.read

    def remove_then_read(self: TensorFolder, *arguments: object, **options: object) -> np.ndarray:
        (source / "tokenizer_config.json").unlink(missing_ok=True)
        return read_tensor(self, *arguments, **options)

    monkeypatch.setattr(TensorFolder, "read", remove_then_read)
    destination = shell.place / "native"
    outcome = shell.run("convert", source, destination, "--quiet")
    unfinished(outcome, destination, "tokenizer_config.json cannot be read: No such file")


def test_shard_that_is_cut_short(shell, source, monkeypatch):
    """By less than a page: to touch a page that is gone would end this process."""
    file = shard(source, 2)
    read_tensor = TensorFolder.read

    def cut_then_read(self: TensorFolder, *arguments: object, **options: object) -> np.ndarray:
        os.truncate(file, size - 2)
        return read_tensor(self, *arguments, **options)

    size = file.stat().st_size
    monkeypatch.setattr(TensorFolder, "read", cut_then_read)
    destination = shell.place / "native"
    outcome = shell.run("convert", source, destination, "--quiet")
    unfinished(outcome, destination, f"{file.name}: the file has been cut short since")


def test_adapter_and_tokens_count_too(shell, source, demo_path, at_the_end):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (source / name).write_bytes((demo_path / name).read_bytes())
    arrays = tensors(vocab_size=4100)
    plain = write(shell.place / "wide", arrays, vocab_size=4100)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (plain / name).write_bytes((demo_path / name).read_bytes())
    adapter, tokens = shell.place / "adapter", shell.place / "tokens.json"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["o_proj"]})
    )
    module = "base_model.model.model.layers.1.self_attn.o_proj"
    matrices = {
        f"{module}.lora_A.weight": np.ones((1, 16), np.float32),
        f"{module}.lora_B.weight": np.ones((16, 1), np.float32),
    }
    weights = adapter / "adapter_model.safetensors"
    for changed in ("adapter 1", "added tokens"):
        save_file(matrices, weights)
        tokens.write_text('["Nebuchadnezzar"]')
        at_the_end(
            (lambda: os.utime(weights, ns=(1, 1)))
            if changed == "adapter 1"
            else (lambda: tokens.write_text('["Jeremiah"]'))
        )
        destination = shell.place / changed
        options = ("--adapter", adapter, "--add-tokens", tokens, "--quiet")
        outcome = shell.run("convert", plain, destination, *options)
        unfinished(outcome, destination, f"{changed} {CHANGED}")


def test_two_runs_at_once(shell, source, at_the_end):
    destination = shell.place / "native"
    others = []

    def run_others() -> None:
        for options in ((), ("--resume",), ("--dry-run",)):
            others.append(shell.run("convert", source, destination, "--quiet", *options))

    at_the_end(run_others)
    shell.convert(source)
    assert [other.code for other in others] == [1, 1, 1]
    assert all("is being written by another process" in other.err for other in others)
    assert bits(read(destination)) == bits(tensors())
