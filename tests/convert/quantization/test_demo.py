"""The bundled model in three bits, from the command line to generated text."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def command(*arguments: object) -> str:
    """Runs the command line in a process of its own, which must succeed."""
    program = [sys.executable, "-m", "qwen_jax.cli", *map(str, arguments)]
    run = subprocess.run(program, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.slow
def test_demo_in_three_bits(tmp_path):
    codes, text = tmp_path / "codes", tmp_path / "text.txt"
    text.write_text((ROOT / "docs" / "log.md").read_text(encoding="utf-8"), encoding="utf-8")
    options = ("--calibration", text, "--calibration-windows", 16, "--window", 256, "--json")
    report = json.loads(command("quantize", "demo", codes, "--bits", 3, *options))
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    # JAX with what it compiles takes most of it.
    assert peak < 2.5e9
    assert report["bits_per_text_weight"] < 4.5
    held = json.loads(command("inspect", codes, "--json"))
    assert held["folder"]["tensors"] == report["tensors_out"]
    arguments = ("--prompt", "And Moses said unto", "--max-tokens", 8, "--temperature", 0)
    text = command("generate", codes, *arguments)
    assert len(text.split()) > 3
    # Three bits of a model this small lose a lot, but not the language.
    assert len(set(text.split())) > 3
