"""Rules that hold for every Python file of the repository."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("qwen_jax", "pallas_kernels", "convert")
FOLDERS = (*PACKAGES, "tests", "benchmarks", "examples")


def python_files(folders: tuple[str, ...]) -> list[Path]:
    files = sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    assert files
    return files


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_no_file_is_longer_than_500_lines():
    lengths = {name(path): len(path.read_text().splitlines()) for path in python_files(FOLDERS)}
    assert {path: lines for path, lines in lengths.items() if lines > 500} == {}


@pytest.mark.parametrize("vague", ["utils.py", "helpers.py", "common.py", "misc.py"])
def test_files_are_named_for_what_they_hold(vague):
    assert [name(path) for path in python_files(FOLDERS) if path.name == vague] == []


def test_private_parts_of_jax_are_not_used():
    users = python_files((*PACKAGES, "benchmarks", "examples"))
    assert [name(path) for path in users if "jax._src" in path.read_text()] == []
