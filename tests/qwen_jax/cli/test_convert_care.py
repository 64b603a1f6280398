"""What `convert` and `export` take care of so that nothing is lost and no damage is passed on."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.convert.sources import tensors, write

FAILURE = 1


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write(tmp_path / "source", tensors())


def test_damage_of_a_native_source_is_not_passed_on(run, source, tmp_path):
    native = tmp_path / "native"
    assert run("convert", str(source), str(native), "-q").code == 0
    shard = next(native.glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    for verb in ("convert", "export"):
        outcome = run(verb, str(native), str(tmp_path / verb), "-q")
        assert outcome.code == FAILURE
        assert "not what conversion.json says" in outcome.err
        assert not (tmp_path / verb).exists()


def test_a_folder_above_the_destination_may_be_a_link(run, source, tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    assert run("convert", str(source), str(tmp_path / "link" / "native"), "-q").code == 0
    assert names(tmp_path / "disk") == {"native"}


def test_an_adapter_given_twice_is_refused(run, source, tmp_path):
    module = "base_model.model.model.layers.1.self_attn.o_proj"
    (tmp_path / "adapter").mkdir()
    save_file(
        {
            f"{module}.lora_A.weight": np.eye(2, 16, dtype=np.float32),
            f"{module}.lora_B.weight": np.eye(16, 2, dtype=np.float32),
        },
        tmp_path / "adapter" / "adapter_model.safetensors",
    )
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["o_proj"]}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(settings))
    adapter = str(tmp_path / "adapter")
    outcome = run(
        "convert", str(source), str(tmp_path / "n"), "--adapter", adapter, "--adapter", adapter
    )
    assert outcome.code == FAILURE
    assert "given twice" in outcome.err


def test_resume_takes_no_other_finished_folder_for_its_own(run, source, demo_path, tmp_path):
    native = tmp_path / "native"
    assert run("convert", str(source), str(native), "-q").code == 0
    same = run("convert", str(source), str(native), "--resume", "--verify", "-q")
    assert (same.code, same.err) == (0, "")
    assert "complete already, verified" in same.out
    other = run("convert", str(demo_path), str(native), "--resume", "-q")
    assert (other.code, other.out) == (FAILURE, "")
    assert "exists and holds" in other.err
