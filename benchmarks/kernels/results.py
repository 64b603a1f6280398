"""What the scripts of this folder share: arguments, a limit of time, and the file of results."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax

from qwen_jax.cli.bandwidth import copy_bytes_per_second
from qwen_jax.cli.provenance import provenance

COPY_BYTES = 1 << 32
Figures = dict[str, dict[str, Any]]


@dataclasses.dataclass
class Results:
    """The figures of one run, written after each case, so that a run that is cut off keeps some.

    Attributes:
        benchmark: name of the script without its ending.
        args: only, sweep, output and commit.
        copy: bytes read and written a second by a 4 GiB copy; None if nothing is compared with it.
        until: no case is begun after this time, unless other configurations are timed.
        figures: by case; "right" says whether it is.
    """

    benchmark: str
    args: argparse.Namespace
    copy: float | None
    until: float
    figures: Figures = dataclasses.field(default_factory=dict)

    @classmethod
    def begin(cls, benchmark: str, what: str, *, seconds: float, copy: bool = True) -> Results:
        """Read the command line, refuse to run without a GPU, and time the copy.

        Args:
            benchmark: name of the script without its ending.
            what: what is checked and timed, for `--help`.
            seconds: no case is begun after so many.
            copy: whether the copy is wanted.
        """
        parser = argparse.ArgumentParser(description=f"Check and time {what} on a GPU.")
        parser.add_argument("--only", default="", help="part of the name of the cases")
        parser.add_argument("--sweep", action="store_true", help="time other configurations too")
        parser.add_argument("--output", type=Path, help="file to write the JSON result to")
        parser.add_argument("--commit", help="the commit, if the code is a copy without history")
        args = parser.parse_args()
        if jax.default_backend() != "gpu":
            raise SystemExit(f"needs a GPU, and JAX sees {jax.default_backend()}")
        until, measured = time.monotonic() + seconds, None
        if copy:
            measured = copy_bytes_per_second(COPY_BYTES)
            print(f"copy: {measured / 1e12:.2f} TB/s read and written", flush=True)
        return cls(benchmark, args, measured, until)

    def selected(self, names: Iterable[str]) -> Iterator[str]:
        """The names that were asked for, as long as there is time."""
        for name in names:
            if self.args.only not in name:
                continue
            if time.monotonic() > self.until and not self.args.sweep:
                print(f"{name}: not run, since its time is over", flush=True)
                continue
            yield name

    def add(self, name: str, row: dict[str, Any]) -> None:
        """Keep the figures of a case."""
        self.figures[name] = row
        print(f"{name}: {row}", flush=True)
        output = self.args.output
        if output is None and os.environ.get("OUT"):
            ending = "-sweep" if self.args.sweep else ""
            name = self.benchmark.replace("_", "-")
            output = Path(os.environ["OUT"]) / f"{name}{ending}.json"
        if output is None:
            return
        script = f"benchmarks/kernels/{self.benchmark}.py"
        result = provenance(["python", script, *sys.argv[1:]])
        result["commit"] = self.args.commit or result["commit"]
        result["benchmark"] = self.benchmark
        if self.copy is not None:
            result["copy_bytes_per_second"] = self.copy
        result["figures"] = self.figures
        output.write_text(json.dumps(result, indent=2) + "\n")

    def finish(self, print_table: Callable[[Figures], None]) -> int:
        """Print the table; 1 if a case is wrong."""
        print_table(self.figures)
        return 0 if all(row.get("right", True) for row in self.figures.values()) else 1
