"""How much a model loses in codes: a table of method x recipe.

    python benchmarks/quantization.py MODEL --calibration train.txt.xz --eval eval.tokens.npy

The recipe "uniform-3" is the one to compare methods with: all linears and experts at 3 bits, groups
of 32, symmetric, the rest as it is. Weights are replaced by the numbers that their codes stand for,
in float32. Prints, over windows of 512 held-out tokens, the mean divergence KL(float || codes) in
nats, how often the most likely token is the same, and perplexity. The last row goes on from GPTQ:
all scales follow the gradient of that divergence on other windows of calibration text.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import qwen_jax
from convert.calibrate import advance, at
from convert.calibration_text import read_calibration
from convert.layer import quantise_layer
from convert.methods import Solved, dequantise, min_max, round_to_nearest
from convert.tuning import divergence, fit_codes
from qwen_jax import CausalLM
from qwen_jax.cli.provenance import provenance
from qwen_jax.errors import RequestError
from qwen_jax.quant import RECIPES, Recipe, Rule, WeightFormat

UNIFORM = "uniform-3"
KEPT = ("embed_tokens.weight", "lm_head.weight")
MIN_MAX, OWN_ENDS, FITTED = "min-max, -4 to 3", "min-max, own levels", "gptq, fitted"
METHODS = (MIN_MAX, OWN_ENDS, "round-to-nearest", "activation-aware", "gptq", FITTED)
WINDOW = 512
AT_ONCE = 4
FIT_AT_ONCE, FIT_HELD_OUT = 2, 16
# Codes stay: moved too (at 5e-3, scales at 1e-2), they did worse than GPTQ on held-out windows.
FIT_CODE_RATE, FIT_SCALE_RATE = 0.0, 6e-3


class Coded(NamedTuple):
    """A model with the numbers that codes stand for in the place of its matrices.

    Attributes:
        model: float32.
        formats: of the tensors in codes, by tree path.
        solved: codes by the same paths; empty where numbers are made without codes.
        bits: of a weight in codes, with scales.
    """

    model: CausalLM
    formats: dict[str, WeightFormat]
    solved: dict[str, Solved]
    bits: float


def recipe(name: str) -> Recipe:
    """A named recipe, or the uniform one."""
    if name != UNIFORM:
        return RECIPES[name]
    formats = tuple(Rule(rule.pattern, WeightFormat(3, 32)) for rule in RECIPES["q4"].rules)
    return Recipe(UNIFORM, tuple(Rule(path, None) for path in KEPT) + formats)


def in_codes(model: CausalLM, recipe: Recipe, method: Any, tokens: np.ndarray) -> Coded:
    """The layers' matrices by one method, each layer on what those before it in codes give it."""
    changed = jax.tree.map(lambda x: x, model)
    coded = Coded(changed, {}, {}, 0.0)
    hidden = np.asarray(model.embed_tokens.weight[...])[tokens]
    for number, layer in enumerate(changed.layers):
        place = f"layers.{number}."
        rules: dict[str, Rule] = {}
        for path in map(_dotted, dict(nnx.to_flat_state(nnx.state(layer)))):
            rule = recipe.rule(place + path)
            if rule is not None and rule.format is not None:
                rules[path] = rule
                coded.formats[place + path] = rule.format
        if method in (MIN_MAX, OWN_ENDS, "round-to-nearest"):
            for path in rules:
                weight = at(layer, path)
                format = coded.formats[place + path]
                weight.set_value(_without_data(weight[...], format, method))
            continue
        chosen = {p: Rule(rule.pattern, rule.format, method) for p, rule in rules.items()}
        solved = quantise_layer(layer, changed.config, hidden, chosen)
        hidden = advance(layer, changed.config, hidden)
        coded.solved.update({place + path: value for path, value in solved.items()})
    return coded._replace(bits=_bits(model, coded))


def fitted(model: CausalLM, start: Coded, tokens: np.ndarray, steps: int) -> Coded:
    """All scales of a model fitted together; the last windows are held out."""
    parts = [(model, tokens[i : i + FIT_AT_ONCE]) for i in range(0, len(tokens), FIT_AT_ONCE)]
    held_out = FIT_HELD_OUT // FIT_AT_ONCE
    changed = jax.tree.map(lambda x: x, start.model)
    weights = {path: at(model, path)[...] for path in start.formats}
    solved = fit_codes(
        changed,
        weights,
        start.solved,
        start.formats,
        divergence,
        parts[:-held_out],
        parts[-held_out:],
        steps=steps,
        code_rate=FIT_CODE_RATE,
        scale_rate=FIT_SCALE_RATE,
    )
    return start._replace(model=changed, solved=solved)


def evaluate(wanted: Sequence[jax.Array], other: CausalLM, windows: np.ndarray) -> dict[str, float]:
    """Divergence, agreement and perplexity, with that of the float model."""
    parts = []
    for number, log_probs in enumerate(wanted):
        some = jnp.asarray(windows[number * AT_ONCE : (number + 1) * AT_ONCE])
        parts.append(np.asarray(_compare(log_probs, other, some)))
    kl, same, loss, base_loss = np.concatenate(parts, axis=1).mean(axis=1)
    return {
        "mean_kl": float(kl),
        "top1_agreement": float(same),
        "perplexity": float(np.exp(loss)),
        "float_perplexity": float(np.exp(base_loss)),
    }


@jax.jit
def _log_probs(model: CausalLM, tokens: jax.Array) -> jax.Array:
    return jax.nn.log_softmax(model(tokens, capture="none").logits, -1)


@jax.jit
def _compare(p: jax.Array, other: CausalLM, tokens: jax.Array) -> jax.Array:
    """Of each window: [4, B]."""
    q = _log_probs(other, tokens)
    nexts = tokens[:, 1:, None]
    losses = [-jnp.take_along_axis(x[:, :-1], nexts, -1)[..., 0].mean(-1) for x in (q, p)]
    kl = jnp.sum(jnp.exp(p) * (p - q), axis=-1).mean(-1)
    same = (p.argmax(-1) == q.argmax(-1)).astype(jnp.float32).mean(-1)
    return jnp.stack([kl, same, *losses])


def _dotted(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path))


def _without_data(weight: jax.Array, format: WeightFormat, method: str) -> jax.Array:
    if method == MIN_MAX:
        return min_max(weight, format)
    return dequantise(round_to_nearest(weight, format, search=method != OWN_ENDS), format)


def _bits(model: CausalLM, coded: Coded) -> float:
    """Bits of a weight; groups that are not full count as they are stored."""
    total = weights = 0
    for path, format in coded.formats.items():
        shape = at(model, path).shape
        groups = math.prod(shape[:-1]) * -(-shape[-1] // format.group_size)
        total += format.bits * math.prod(shape) + 16 * groups * (1 if format.symmetric else 2)
        solved = coded.solved.get(path)
        if solved is not None and solved.input_scale is not None:
            total += 32 * solved.input_scale.size
        weights += math.prod(shape)
    return total / weights


def held_out(path: Path, count: int, skip: int) -> np.ndarray:
    """Windows spread evenly over a token file, without overlap, none of the first ones."""
    tokens = np.load(path).astype(np.int32)
    available = len(tokens) // WINDOW
    if available - skip < count:
        raise RequestError(
            f"{path} holds {available} windows of {WINDOW}; {count} behind the first {skip} are "
            "asked for"
        )
    chosen = np.linspace(skip, available - 1, count).astype(int)
    return tokens[: available * WINDOW].reshape(available, WINDOW)[chosen]


def main() -> None:
    """Print the table and write the results."""
    args = _parser().parse_args()
    model, tokenizer = qwen_jax.load(args.model, dtype="float32")
    tokens, fit_tokens = (
        read_calibration(
            args.calibration, tokenizer, model.config.vocab_size, window=WINDOW, windows=count
        )
        for count in (args.windows, args.fit_windows)
    )
    windows = held_out(args.eval, args.eval_windows, args.skip)
    wanted = [
        _log_probs(model, jnp.asarray(windows[i : i + AT_ONCE]))
        for i in range(0, len(windows), AT_ONCE)
    ]
    rows = []
    print("| recipe | method | bits | mean KL | of min-max | top-1 | perplexity | seconds |")
    print("|---|---|---:|---:|---:|---:|---:|---:|", flush=True)
    for name in args.recipe:
        coded: dict[str, Coded] = {}
        for method in METHODS:
            begin = time.perf_counter()
            if method == FITTED:
                coded[method] = fitted(model, coded["gptq"], fit_tokens, args.fit_steps)
            else:
                coded[method] = in_codes(model, recipe(name), method, tokens)
            seconds = time.perf_counter() - begin
            figures = evaluate(wanted, coded[method].model, windows)
            rows.append({"recipe": name, "method": method, "bits": coded[method].bits, **figures})
            rows[-1]["seconds"] = seconds
            first = next(row for row in rows if row["recipe"] == name)["mean_kl"]
            rows[-1]["of_min_max"] = figures["mean_kl"] / first
            print(
                f"| {name} | {method} | {rows[-1]['bits']:.2f} | {figures['mean_kl']:.4f} | "
                f"{rows[-1]['of_min_max']:.3f} | {figures['top1_agreement']:.3f} | "
                f"{figures['perplexity']:.2f} | {seconds:.0f} |",
                flush=True,
            )
            if args.output:
                _write(args, rows)


def _write(args: argparse.Namespace, rows: Sequence[dict[str, Any]]) -> None:
    names = ("windows", "fit_windows", "fit_steps", "eval_windows", "skip")
    report = {
        "benchmark": "quantization",
        **provenance(["python", "benchmarks/quantization.py", Path(args.model).name]),
        "model": Path(args.model).name,
        "window": WINDOW,
        **{name: getattr(args, name) for name in names},
        "figures": rows,
    }
    args.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--calibration", type=Path, nargs="+", required=True)
    parser.add_argument("--eval", type=Path, required=True)
    parser.add_argument("--recipe", nargs="+", default=[UNIFORM])
    parser.add_argument("--windows", type=int, default=64, help="of calibration, layer by layer")
    parser.add_argument("--fit-windows", type=int, default=256, help="of the fit of the whole")
    parser.add_argument("--fit-steps", type=int, default=120)
    parser.add_argument("--eval-windows", type=int, default=64)
    parser.add_argument("--skip", type=int, default=16, help="windows that choices were made on")
    parser.add_argument("--output", type=Path)
    return parser


if __name__ == "__main__":
    main()
