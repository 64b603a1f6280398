"""Time to load a native folder beside the Hugging Face layouts that it was converted from.

Writes a part of Qwen3.6-35B-A3B with random values, converts it, and loads each folder in turn, the
files in the page cache.

python benchmarks/loading.py --output benchmarks/results/h200/loading.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.synthetic import PRESET, write_source
from convert.from_hf import plan_conversion
from convert.run import run
from qwen_jax.checkpoint.parameters import abstract_parameters, load_parameters
from qwen_jax.checkpoint.plan import plan_load
from qwen_jax.checkpoint.safetensors_io import open_folder
from qwen_jax.cli.console import size, table
from qwen_jax.cli.environment import prepare_environment
from qwen_jax.cli.provenance import provenance
from qwen_jax.config import QwenConfig

SHARD_BYTES = 4_000_000_000


def main() -> int:
    """Measure the three folders, print a table, keep the figures."""
    prepare_environment()
    arguments = _parser().parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.work_dir) as folder:
        figures = _measure(_write(Path(folder), arguments.layers), arguments.trials)
    result = {
        "benchmark": "loading",
        **provenance(["python", *sys.argv]),
        "request": {"preset": PRESET, "layers": arguments.layers, "trials": arguments.trials},
        "figures": figures,
    }
    result["commit"] = result["commit"] or arguments.commit
    if arguments.output is not None:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(result, indent=2) + "\n")
    rows = {
        name: f"{figure['median']:.2f} s, {size(figure['bytes'] / figure['median'])}/s"
        for name, figure in figures.items()
    }
    print(table({"device": result["device"]["kind"], **rows}))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Measure loading of native and other folders.")
    parser.add_argument("--work-dir", type=Path, help="where to write; the temporary folder if not")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--output", type=Path, help="file to write the JSON result to")
    parser.add_argument("--commit", help="the commit, where the code is a copy without its history")
    return parser


def _write(folder: Path, layers: int) -> dict[str, Path]:
    folders = {name: folder / name for name in ("fused", "per expert", "native")}
    write_source(folders["fused"], layers, "fused", "bf16")
    write_source(folders["per expert"], layers, "per_expert", "bf16")
    run(
        plan_conversion(folders["fused"], drop_mtp=True),
        folders["native"],
        max_shard_bytes=SHARD_BYTES,
    )
    return folders


def _measure(folders: dict[str, Path], trials: int) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {name: [] for name in folders}
    nbytes = 0
    for trial in range(-1, trials):
        for name, folder in folders.items():
            begin = time.perf_counter()
            nbytes = _load(folder)
            if trial >= 0:  # the one before fills the page cache
                seconds[name].append(time.perf_counter() - begin)
    return {
        name: {"seconds": values, "median": statistics.median(values), "bytes": nbytes}
        for name, values in seconds.items()
    }


def _load(folder: Path) -> int:
    plan = plan_load(open_folder(folder), QwenConfig.from_hf(folder))
    arrays = load_parameters(plan, abstract_parameters(plan.config, "bfloat16"))
    return sum(array.nbytes for array in arrays.values())


if __name__ == "__main__":
    sys.exit(main())
