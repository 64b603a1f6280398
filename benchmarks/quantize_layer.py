"""Time and memory to put one layer of a released shape in codes, calibrated on random inputs.

python benchmarks/quantize_layer.py --output benchmarks/results/h200/quantize-layer.json

The layer is drawn on the device. The first pass compiles; later ones are what most layers of a
model take. Host memory is that of the whole process.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import numpy as np
from flax import nnx

from convert.calibrate import advance
from convert.layer import quantise_layer
from convert.quantization.packed import packed
from qwen_jax.checkpoint.tensors import tree_tensors
from qwen_jax.cli.console import size, table
from qwen_jax.cli.environment import prepare_environment
from qwen_jax.cli.provenance import provenance
from qwen_jax.config import QwenConfig
from qwen_jax.memory import peak_memory
from qwen_jax.model.initialise import initialise
from qwen_jax.quant import RECIPES, Rule, TensorScheme

LAYER = "layers.0."


def main() -> int:
    """Measure, print a table, keep the figures."""
    prepare_environment()
    arguments = _parser().parse_args()
    config = _config(arguments)
    rules = _rules(config, arguments)
    hidden = _hidden(arguments.windows, arguments.window, config.hidden_size)
    passes = []
    for number in range(arguments.passes):
        passes.append(_measure(config, hidden, rules))
        print(f"pass {number + 1}: {passes[-1]['seconds']:.1f} s", flush=True)
    result = {
        "benchmark": "quantize_layer",
        **provenance(["python", *sys.argv]),
        "request": {
            name: value
            for name, value in vars(arguments).items()
            if name not in ("output", "commit")
        },
        "passes": passes,
        "peak_device_bytes": peak_memory(),
        "peak_host_bytes": _peak_host(),
    }
    result["commit"] = result["commit"] or arguments.commit
    output = arguments.output
    if output is None and os.environ.get("OUT"):
        output = Path(os.environ["OUT"]) / f"quantize-layer-{arguments.kind}.json"
    if output is not None:
        output.write_text(json.dumps(result, indent=2) + "\n")
    print(table(_rows(result)))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Measure the quantisation of one layer.")
    parser.add_argument("--preset", default="qwen3.6-35b-a3b")
    parser.add_argument("--kind", choices=("linear", "full"), default="linear", help="of attention")
    parser.add_argument("--recipe", choices=tuple(RECIPES), default="q3")
    parser.add_argument("--method", help="in place of the methods of the recipe")
    parser.add_argument("--experts", type=int, help="fewer experts than the shape has")
    parser.add_argument("--hidden-size", type=int, help="another one than the shape has")
    parser.add_argument("--windows", type=int, default=64)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--passes", type=int, default=2, help="the first one compiles")
    parser.add_argument("--output", type=Path, help="file to write the JSON result to")
    parser.add_argument("--commit", help="the commit, where the code is a copy without its history")
    return parser


def _config(arguments: argparse.Namespace) -> QwenConfig:
    config = QwenConfig.preset(arguments.preset)
    return dataclasses.replace(
        config,
        num_hidden_layers=1,
        layer_types=(f"{arguments.kind}_attention",),
        vocab_size=256,
        num_experts=arguments.experts or config.num_experts,
        hidden_size=arguments.hidden_size or config.hidden_size,
        dtype="float32",
    )


def _rules(config: QwenConfig, arguments: argparse.Namespace) -> dict[str, Rule]:
    rules = {}
    for path in (p for p in tree_tensors(config) if p.startswith(LAYER)):
        rule = RECIPES[arguments.recipe].rule(path)
        if rule is not None and arguments.method is not None:
            rule = dataclasses.replace(rule, method=arguments.method)
        if rule is not None:
            rules[path.removeprefix(LAYER)] = rule
    return rules


def _hidden(windows: int, window: int, width: int) -> np.ndarray:
    """Random states whose channels differ in size, as they do in trained models."""
    rng = np.random.default_rng(0)
    channels = np.exp(rng.normal(0, 1, width)).astype(np.float32)
    hidden = rng.standard_normal((windows, window, width), np.float32)
    hidden *= channels
    return hidden


def _measure(config: QwenConfig, hidden: np.ndarray, rules: dict[str, Rule]) -> dict[str, Any]:
    layer = initialise(config, jax.random.key(0)).layers[0]
    jax.block_until_ready(nnx.state(layer))
    begin = time.perf_counter()
    found = quantise_layer(layer, config, hidden, rules)
    solved = time.perf_counter()
    advance(layer, config, hidden)
    advanced = time.perf_counter()
    del layer
    nbytes = 0
    for path, tensor in found.items():
        form = rules[path].format
        assert form is not None
        scheme = TensorScheme(form, tensor.input_scale is not None)
        made = packed(path, tensor, scheme)
        nbytes += made.codes.nbytes + made.scale.nbytes
    return {
        "seconds": solved - begin,
        "advance_seconds": advanced - solved,
        "packing_seconds": time.perf_counter() - advanced,
        "bytes": nbytes,
        "tensors": {path: tensor.report.to_json() for path, tensor in found.items()},
    }


def _peak_host() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _rows(result: dict[str, Any]) -> dict[str, str]:
    rows = {"device": result["device"]["kind"]}
    for number, figures in enumerate(result["passes"]):
        name = f"pass {number + 1}"
        rows[name] = (
            f"{figures['seconds']:.1f} s, forward {figures['advance_seconds']:.1f} s, "
            f"packing {figures['packing_seconds']:.1f} s"
        )
    rows["codes"] = size(result["passes"][-1]["bytes"])
    rows["peak device"] = size(result["peak_device_bytes"])
    rows["peak host"] = size(result["peak_host_bytes"])
    for path, report in result["passes"][-1]["tensors"].items():
        output = report["output_error"]
        text = "no data" if output is None else f"{output:.4f}"
        rows[path] = f"{report['method']}: weights {report['weight_error']:.4f}, outputs {text}"
    return rows


if __name__ == "__main__":
    sys.exit(main())
