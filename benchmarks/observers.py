"""What watching the routing costs a decode loop: with nothing, counts, counts of logits, all ids.

    python benchmarks/observers.py qwen3.6-35b-a3b --recipe q3 [--batch-size 8] [--output FILE]

Random weights; whole loops in one call, the kinds in turn in each trial. Exits with 1 where a token
differs from the loop that nothing watches, or counts mode costs more than 5 %.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
import numpy as np

from qwen_jax import QwenConfig, init_cache, initialise, prefill_prompts
from qwen_jax.cli.measure import first_layers
from qwen_jax.cli.provenance import provenance
from qwen_jax.decode import Observer, start
from qwen_jax.decode.loop import raise_on_failure, run_steps
from qwen_jax.model import CausalLM, FlatModel
from qwen_jax.quant import named_recipe
from qwen_jax.research import RoutingCounts, RoutingRecorder, statistics

BAR = 1.05
KINDS = ("none", "counts", "counts with logits", "recorder")


def main() -> int:
    """Measures what the arguments say."""
    arguments = _parser().parse_args()
    config = QwenConfig.preset(arguments.model)
    if arguments.num_layers is not None:
        config = first_layers(config, arguments.num_layers)
    recipe = None if arguments.recipe is None else named_recipe(arguments.recipe)
    model = jax.block_until_ready(initialise(config, jax.random.key(0), recipe))
    loops = Loops(model, arguments)
    tokens = {kind: loops.run(kind)[1] for kind in KINDS}
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(arguments.num_trials):
        for kind in KINDS:
            seconds[kind].append(loops.run(kind)[0])
    result = _figures(seconds, tokens)
    _show(result)
    if arguments.output is not None:
        report = {"benchmark": "observers", **provenance(["python", *sys.argv]), "figures": result}
        report["commit"] = report["commit"] or arguments.commit
        arguments.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    counts = loops.seen["counts"]
    chosen = statistics.counts_of(
        loops.seen["recorder"].trace(tokens["recorder"]).ids, config.num_experts
    )
    agrees = np.array_equal(np.asarray(counts.chosen), chosen)
    print("counts and recorded ids agree:", agrees)
    fine = all(figure["same_tokens"] for figure in result.values())
    return 0 if agrees and fine and result["counts"]["relative"] <= BAR else 1


class Loops:
    """One model and the prompts to go on from."""

    def __init__(self, model: CausalLM, arguments: argparse.Namespace):
        self.model, self.flat = model, FlatModel.of(model)
        self.rows, self.new = arguments.batch_size, arguments.generation_tokens
        self.length = arguments.prompt_tokens + self.new
        shape = (self.rows, arguments.prompt_tokens)
        self.prompts = np.random.default_rng(0).integers(0, model.config.vocab_size, shape).tolist()
        self.seen: dict[str, Any] = {}

    def observer(self, kind: str) -> Observer | None:
        """A fresh observer: the loop takes it over."""
        config = self.model.config
        if kind == "none":
            return None
        if kind == "recorder":
            return RoutingRecorder.empty(config, batch_size=self.rows, steps=self.new - 1)
        return RoutingCounts.zeros(config, "full" if "logits" in kind else "ids")

    def run(self, kind: str) -> tuple[float, np.ndarray]:
        """Seconds a step of one loop, and its tokens."""
        cache = init_cache(self.model.config, self.rows, self.length)
        logits, cache = prefill_prompts(self.model, cache, self.prompts)
        limit = jnp.asarray(self.new, jnp.int32)
        state = start(logits, max_tokens=limit, capacity=self.new, observer=self.observer(kind))
        jax.block_until_ready((state, cache))
        begin = time.perf_counter()
        state, cache = run_steps(self.flat, cache, state, max_steps=jnp.int32(self.new - 1))
        jax.device_get(state.last)
        took = (time.perf_counter() - begin) / (self.new - 1)
        raise_on_failure(state, cache)
        self.seen[kind] = state.observer
        return took, np.asarray(state.tokens)


def _figures(
    seconds: dict[str, list[float]], tokens: dict[str, np.ndarray]
) -> dict[str, dict[str, Any]]:
    base = float(np.median(seconds["none"]))
    return {
        kind: {
            "seconds_per_step": float(np.median(seconds[kind])),
            "relative": float(np.median(seconds[kind])) / base,
            "same_tokens": bool(np.array_equal(tokens[kind], tokens["none"])),
        }
        for kind in KINDS
    }


def _show(result: dict[str, dict[str, Any]]) -> None:
    for kind, figure in result.items():
        print(
            f"{kind:20} {figure['seconds_per_step'] * 1e3:8.3f} ms a step  "
            f"{figure['relative']:6.3f} x  same tokens: {figure['same_tokens']}"
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="a preset with experts")
    parser.add_argument("--recipe", help="put the random weights into codes, such as q3")
    parser.add_argument("--num-layers", type=int, help="only the first layers")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--generation-tokens", type=int, default=128)
    parser.add_argument("--num-trials", type=int, default=5)
    parser.add_argument("--output", type=Path, help="file to write the JSON result to")
    parser.add_argument("--commit", help="the commit, where the code is a copy without its history")
    return parser


if __name__ == "__main__":
    sys.exit(main())
