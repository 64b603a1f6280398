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

from convert.calibrate import HiddenStates, quantise_layer
from convert.quantization.packed import packed
from qwen_jax.cli.console import size, table
from qwen_jax.cli.environment import prepare_environment
from qwen_jax.cli.provenance import provenance
from qwen_jax.config import QwenConfig
from qwen_jax.memory import peak_memory
from qwen_jax.model.decoder import DecoderLayer
from qwen_jax.model.initialise import initialise
from qwen_jax.quant import RECIPES, Rule, TensorScheme

Figures = list[dict[str, Any]]


def main() -> int:
    """Measure, print a table, keep the figures."""
    prepare_environment()
    arguments = _parser().parse_args()
    config = _config(arguments)
    layer = initialise(config, jax.random.key(0)).layers[0]
    rules = _rules(layer, arguments)
    hidden = _hidden(arguments.windows, arguments.window, config.hidden_size)
    passes = [_measure(layer, config, hidden, rules) for _ in range(arguments.passes)]
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
        dtype="float32" if jax.default_backend() == "cpu" else "bfloat16",
    )


def _rules(layer: DecoderLayer, arguments: argparse.Namespace) -> dict[str, Rule]:
    from flax import nnx

    rules = {}
    for parts, _ in nnx.to_flat_state(nnx.state(layer)):
        path = ".".join(map(str, parts))
        rule = RECIPES[arguments.recipe].rule(f"layers.0.{path}")
        if rule is not None and arguments.method is not None:
            rule = dataclasses.replace(rule, method=arguments.method)
        if rule is not None:
            rules[path] = rule
    return rules


def _hidden(windows: int, window: int, width: int) -> HiddenStates:
    """Random states whose channels differ in size, as they do in trained models."""
    rng = np.random.default_rng(0)
    channels = np.exp(rng.normal(0, 1, width)).astype(np.float32)
    reference = rng.standard_normal((windows, window, width), np.float32) * channels
    noise = rng.standard_normal((windows, window, width), np.float32)
    return HiddenStates(reference + 0.05 * channels * noise, reference)


def _measure(
    layer: DecoderLayer, config: QwenConfig, hidden: HiddenStates, rules: dict[str, Rule]
) -> dict[str, Any]:
    begin = time.perf_counter()
    result = quantise_layer(layer, config, hidden, rules)
    solved = time.perf_counter()
    nbytes = 0
    for path, tensor in result.solved.items():
        form = rules[path].format
        assert form is not None
        scheme = TensorScheme(form, tensor.input_scale is not None)
        made = packed(path, tensor, scheme)
        nbytes += made.codes.nbytes + made.scale.nbytes
    return {
        "seconds": solved - begin,
        "packing_seconds": time.perf_counter() - solved,
        "bytes": nbytes,
        "tensors": {path: tensor.report.to_json() for path, tensor in result.solved.items()},
    }


def _peak_host() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _rows(result: dict[str, Any]) -> dict[str, str]:
    rows = {"device": result["device"]["kind"]}
    for number, figures in enumerate(result["passes"]):
        name = f"pass {number + 1}"
        rows[name] = f"{figures['seconds']:.1f} s, packing {figures['packing_seconds']:.1f} s"
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
