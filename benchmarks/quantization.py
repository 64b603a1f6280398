"""How much a model loses in codes: a table of method x recipe.

    python benchmarks/quantization.py MODEL --calibration train.txt.xz --eval eval.tokens.npy

The recipe "uniform-3" is the one to compare methods with: all linears and experts at 3 bits, groups
of 32, symmetric, the rest as it is. Weights are replaced by the numbers that their codes stand for,
in float32; each row starts from the float model. Prints, over windows of 512 held-out tokens, the
mean divergence KL(float || codes) in nats, how often the most likely token is the same, and
perplexity.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import qwen_jax
from convert.calibrate import advance, at
from convert.calibration_text import read_calibration
from convert.layer import quantise_layer
from convert.methods import Solved, min_max, rounded_without_data
from convert.tuning import divergence, fit_scales
from qwen_jax import CausalLM
from qwen_jax.cli.provenance import provenance
from qwen_jax.errors import RequestError
from qwen_jax.quant import RECIPES, Recipe, Rule, WeightFormat

UNIFORM = "uniform-3"
KEPT = ("embed_tokens.weight", "lm_head.weight")
FITTED = "gptq, scales fitted"
METHODS = ("min-max", "round-to-nearest", "activation-aware", "gptq", FITTED)
WINDOW = 512
AT_ONCE = 4
FIT_RATE = 1e-2


def recipe(name: str) -> Recipe:
    """A named recipe, or the uniform one."""
    if name != UNIFORM:
        return RECIPES[name]
    formats = tuple(Rule(rule.pattern, WeightFormat(3, 32)) for rule in RECIPES["q4"].rules)
    return Recipe(UNIFORM, tuple(Rule(path, None) for path in KEPT) + formats)


def in_codes(
    model: CausalLM, recipe: Recipe, method: Any, tokens: np.ndarray, fitting: np.ndarray | None
) -> tuple[CausalLM, float]:
    """The model with its matrices in codes, and the bits of each of their weights."""
    changed = jax.tree.map(lambda x: x, model)
    bits: list[tuple[float, int]] = []
    everything: dict[str, Solved] = {}
    formats: dict[str, Any] = {}
    hidden = np.asarray(model.embed_tokens.weight[...])[tokens]
    for number, layer in enumerate(changed.layers):
        rules: dict[str, Rule] = {}
        for path in map(_dotted, dict(nnx.to_flat_state(nnx.state(layer)))):
            rule = recipe.rule(f"layers.{number}.{path}")
            if rule is not None:
                rules[path] = Rule(
                    rule.pattern, rule.format, "gptq" if method == "min-max" else method
                )
        if method == "min-max":
            for path, rule in rules.items():
                weight = at(layer, path)
                weight.set_value(min_max(weight[...], rule.format))
                size = rule.format.bits + 16 / rule.format.group_size
                bits.append((size * weight[...].size, weight[...].size))
            continue
        if method == "round-to-nearest":
            solved = {}
            for path, rule in rules.items():
                solved[path] = rounded_without_data(np.asarray(at(layer, path)[...]), rule)
                at(layer, path).set_value(solved[path].weight(rule.format))
        else:
            solved = quantise_layer(layer, changed.config, hidden, rules)
            hidden = advance(layer, changed.config, hidden)
            everything |= {f"layers.{number}.{path}": value for path, value in solved.items()}
            formats |= {f"layers.{number}.{path}": rule.format for path, rule in rules.items()}
        bits += [_bits(value, rules[path].format) for path, value in solved.items()]
    if fitting is not None:
        batches = [(model, fitting[i : i + AT_ONCE]) for i in range(0, len(fitting), AT_ONCE)]
        steps = len(batches)
        fit_scales(changed, everything, formats, divergence, batches, steps=steps, rate=FIT_RATE)
    total, weights = map(sum, zip(*bits, strict=True))
    return changed, total / weights


def evaluate(base: CausalLM, other: CausalLM, windows: np.ndarray) -> dict[str, float]:
    """Divergence, agreement and perplexity, with that of the float model."""
    parts = []
    for start in range(0, len(windows), 4):
        parts.append(np.asarray(_compare(base, other, jnp.asarray(windows[start : start + 4]))))
    kl, same, loss, base_loss = np.concatenate(parts, axis=1).mean(axis=1)
    return {
        "mean_kl": float(kl),
        "top1_agreement": float(same),
        "perplexity": float(np.exp(loss)),
        "float_perplexity": float(np.exp(base_loss)),
    }


@jax.jit
def _compare(base: CausalLM, other: CausalLM, tokens: jax.Array) -> jax.Array:
    """Of each window: [4, B]."""
    p, q = (jax.nn.log_softmax(m(tokens, capture="none").logits, -1) for m in (base, other))
    nexts = tokens[:, 1:, None]
    losses = [-jnp.take_along_axis(x[:, :-1], nexts, -1)[..., 0].mean(-1) for x in (q, p)]
    kl = jnp.sum(jnp.exp(p) * (p - q), axis=-1).mean(-1)
    same = (p.argmax(-1) == q.argmax(-1)).astype(jnp.float32).mean(-1)
    return jnp.stack([kl, same, *losses])


def _dotted(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path))


def _bits(solved: Solved, format: WeightFormat) -> tuple[float, int]:
    weights = solved.codes.values.size
    arrays = 16 * solved.codes.scale.size * (1 if format.symmetric else 2)
    arrays += 0 if solved.input_scale is None else 32 * solved.input_scale.size
    return format.bits * weights + arrays, weights


def held_out(path: Path, count: int) -> np.ndarray:
    """Windows spread evenly over a token file, without overlap."""
    tokens = np.load(path).astype(np.int32)
    available = len(tokens) // WINDOW
    if available < count:
        raise RequestError(f"{path} holds {available} windows of {WINDOW}; {count} are asked for")
    chosen = np.linspace(0, available - 1, count).astype(int)
    return tokens[: available * WINDOW].reshape(available, WINDOW)[chosen]


def main() -> None:
    """Print the table and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--calibration", type=Path, nargs="+", required=True)
    parser.add_argument("--eval", type=Path, required=True)
    parser.add_argument("--recipe", nargs="+", default=[UNIFORM])
    parser.add_argument("--method", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--windows", type=int, default=64)
    parser.add_argument("--eval-windows", type=int, default=32)
    parser.add_argument("--fit-windows", type=int, default=256)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    model, tokenizer = qwen_jax.load(args.model, dtype="float32")
    tokens, fit_tokens = (
        read_calibration(
            args.calibration, tokenizer, model.config.vocab_size, window=WINDOW, windows=count
        )
        for count in (args.windows, args.fit_windows)
    )
    windows = held_out(args.eval, args.eval_windows)
    rows = []
    print("| recipe | method | bits | mean KL | of min-max | top-1 | perplexity | seconds |")
    print("|---|---|---:|---:|---:|---:|---:|---:|")
    for name in args.recipe:
        first = None
        for method in args.method:
            begin = time.perf_counter()
            chosen, fitted = ("gptq", fit_tokens) if method == FITTED else (method, None)
            changed, bits = in_codes(model, recipe(name), chosen, tokens, fitted)
            seconds = time.perf_counter() - begin
            figures = evaluate(model, changed, windows)
            first = first or figures["mean_kl"]
            rows.append({"recipe": name, "method": method, "bits": bits, **figures})
            print(
                f"| {name} | {method} | {bits:.2f} | {figures['mean_kl']:.4f} | "
                f"{figures['mean_kl'] / first:.3f} | {figures['top1_agreement']:.3f} | "
                f"{figures['perplexity']:.2f} | {seconds:.0f} |",
                flush=True,
            )
    if args.output:
        settings = {
            "windows": args.windows,
            "fit_windows": args.fit_windows,
            "eval_windows": args.eval_windows,
            "window": WINDOW,
        }
        command = ["python", "benchmarks/quantization.py", Path(args.model).name]
        report = {
            "benchmark": "quantization",
            **provenance(command),
            "model": Path(args.model).name,
            **settings,
            "window": WINDOW,
            "figures": rows,
        }
        args.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
