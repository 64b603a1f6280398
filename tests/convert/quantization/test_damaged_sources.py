"""Damaged sources of codes are found, and a finished folder of another run is told apart."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from tests.convert.quantization.models import recipe, source
from tests.convert.sources import Shell

RULES = [{"pattern": "*.self_attn.q_proj.weight", "bits": 4, "group_size": 64}]


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Shell:
    return Shell(capsys, tmp_path)


def damage(folder: Path, key: str) -> None:
    """Flips a bit of a tensor's first value."""
    (shard,) = (s for s in folder.glob("*.safetensors") if key in safe_open(s, "np").keys())
    data = bytearray(shard.read_bytes())
    header = int.from_bytes(data[:8], "little")
    start = data.index(f'"{key}"'.encode())
    offset = int(data[data.index(b'"data_offsets":[', start) + 16 :].split(b",")[0])
    data[8 + header + offset] ^= 1
    shard.write_bytes(data)


def native_and_codes(shell: Shell) -> tuple[Path, Path, Path]:
    """A native folder, one in codes, and the recipe."""
    native, codes, rules = shell.place / "native", shell.place / "codes", recipe(shell.place, RULES)
    assert shell.run("convert", source(shell.place / "source"), native, "-q").code == 0
    assert shell.run("quantize", native, codes, "-q", "--recipe", rules).code == 0
    return native, codes, rules


def test_damaged_tensors_are_never_written_anew(shell):
    native, codes, rules = native_and_codes(shell)
    weight = next(k for k in keys(native) if k.endswith("self_attn.q_proj.weight"))
    damage(codes, f"{weight}.codes")
    for verb in ("convert", "export"):
        outcome = shell.run(verb, codes, shell.place / verb, "-q")
        assert outcome.code == 1 and f"{weight}.codes" in outcome.err
        assert not (shell.place / verb).exists()
    damage(native, weight)
    outcome = shell.run("quantize", native, shell.place / "again", "-q", "--recipe", rules)
    assert outcome.code == 1 and weight in outcome.err
    assert not (shell.place / "again").exists()


def test_a_finished_folder_of_another_method_is_not_this_one(shell):
    native, codes, rules = native_and_codes(shell)
    arguments = ("quantize", native, codes, "--recipe", rules, "--resume")
    assert shell.run(*arguments).code == 0
    (shell.place / "text.txt").write_text("In the beginning God created the heaven. " * 9)
    outcome = shell.run(*arguments, "--method", "activation-aware", "-q")
    assert outcome.code != 0
    other = ("--calibration", shell.place / "ids.npy", "--window", 4)
    np.save(shell.place / "ids.npy", np.arange(32))
    outcome = shell.run(*arguments, *other)
    assert outcome.code == 1 and "exists" in outcome.err


def keys(folder: Path) -> list[str]:
    return [key for shard in folder.glob("*.safetensors") for key in safe_open(shard, "np").keys()]
