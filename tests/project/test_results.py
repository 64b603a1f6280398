"""The README's tables say what the result files say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_tables_are_those_of_the_results():
    command = [sys.executable, ROOT / "benchmarks" / "report.py", "--check"]
    assert subprocess.run(command).returncode == 0, "run `python benchmarks/report.py`"
