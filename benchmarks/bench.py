"""`qwen-jax bench` for machines without the command line's libraries: same measurement, same JSON.

python benchmarks/bench.py qwen3.6-35b-a3b --dummy --output benchmarks/results/h200/bench-bf16.json
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from qwen_jax.cli import guarded
from qwen_jax.cli.bench_request import BenchRequest
from qwen_jax.cli.console import Notes, write_json
from qwen_jax.cli.environment import prepare_environment
from qwen_jax.cli.flags import flag

if TYPE_CHECKING:
    from qwen_jax.cli.measure import Prepared


def main() -> int:
    """Measure what the arguments say, print the figures, and keep them if asked to."""
    prepare_environment()
    return guarded(_bench)


def _bench() -> None:
    values = vars(_parser().parse_args())
    output, as_json, commit = (values.pop(name) for name in ("output", "json", "commit"))
    request = BenchRequest(**values)

    from qwen_jax.cli.report import as_text

    result = result_of(request, Notes(), commit)
    if output is not None:
        write(result, output)
    if as_json:
        write_json(result)
    else:
        print(as_text(result))


def result_of(
    request: BenchRequest, notes: Notes, commit: str | None, prepared: Prepared | None = None
) -> dict[str, Any]:
    """What `run_bench` gives, and the commit that was told, or the code's own."""
    from qwen_jax.cli.report import run_bench

    result = run_bench(request, notes, ["python", "benchmarks/bench.py"], prepared)
    result["commit"] = commit or result["commit"]
    return result


def write(result: dict[str, Any], output: Path) -> None:
    """Keep a result as JSON; folders are made."""
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=2, allow_nan=False) + "\n")


def _parser() -> argparse.ArgumentParser:
    """One flag for each field of the request, as the command line has them."""
    parser = argparse.ArgumentParser(
        description="Measure prefill, first-token and inter-token times."
    )
    parser.add_argument("model", help="a preset, a model folder, demo, or a Hub id")
    for field in dataclasses.fields(BenchRequest):
        name = flag(field.name)
        if field.name == "dummy":
            parser.add_argument(
                name, action="store_true", help="random weights, made on the device"
            )
        elif field.name == "dtype":
            parser.add_argument(name, choices=("float32", "bfloat16"))
        elif field.name == "implementation":
            parser.add_argument(name, choices=("triton", "reference"))
        elif field.name == "kv_cache_dtype":
            parser.add_argument(name, choices=("int8",))
        elif field.name == "recipe":
            parser.add_argument(name, help="put the random weights into codes, such as q3")
        elif field.name == "revision":
            parser.add_argument(name, help="branch, tag or commit of a Hub model")
        elif field.name != "model":
            parser.add_argument(name, type=int, default=field.default)
    parser.add_argument("--output", type=Path, help="file to write the JSON result to")
    parser.add_argument("--json", action="store_true", help="print the JSON result, not a table")
    parser.add_argument("--commit", help="the commit, where the code is a copy without its history")
    return parser


if __name__ == "__main__":
    sys.exit(main())
