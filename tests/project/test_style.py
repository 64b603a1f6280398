"""The linter, the formatter, the type checker and the import rules all find nothing."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def check(program: str, *arguments: str) -> None:
    path = Path(sysconfig.get_path("scripts")) / program
    if not path.exists():
        pytest.fail(f'{path} is missing; install the test tools with `pip install -e ".[test]"`')
    run = subprocess.run(
        [path, *arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if run.returncode:
        pytest.fail(f"{program} {' '.join(arguments)}\n{run.stdout}", pytrace=False)


def test_linter_finds_nothing():
    check("ruff", "check", "--output-format", "concise", ".")


def test_files_are_formatted():
    check("ruff", "format", "--check", ".")


def test_types_fit():
    check("basedpyright", "--pythonpath", sys.executable)


def test_import_rules_are_kept():
    check("lint-imports")
