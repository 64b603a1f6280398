"""`qwen-jax tune` for machines without the command line's libraries: same work, same file.

python benchmarks/tune.py qwen3.6-35b-a3b --recipe q3 --budget-seconds 240 --output nvidia-h200.json
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from qwen_jax.cli import guarded
from qwen_jax.cli.console import Notes, table
from qwen_jax.cli.environment import prepare_environment
from qwen_jax.cli.tune_request import TuneRequest


def main() -> int:
    """Tune what the arguments say, and print what was found."""
    prepare_environment()
    return guarded(_tune)


def _tune() -> None:
    request = TuneRequest(
        **{k: v for k, v in vars(_parser().parse_args()).items() if v is not None}
    )

    from qwen_jax.cli.tuning import as_rows, tune

    print(table(as_rows(tune(request, Notes()))))


def _parser() -> argparse.ArgumentParser:
    """The flags of the command line; lists are numbers behind one another."""
    parser = argparse.ArgumentParser(description="Find how kernels are cut best on this GPU.")
    parser.add_argument("model", help="a preset, a model folder, demo, or a Hub id")
    parser.add_argument("--batch-size", dest="batch_sizes", type=int, nargs="*")
    parser.add_argument("--prompt-tokens", type=int, nargs="*")
    for name in ("context", "num-layers", "budget-seconds"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--recipe", help="put the random weights into codes, such as q3")
    parser.add_argument("--output", type=Path, help="file to write")
    return parser


if __name__ == "__main__":
    sys.exit(main())
