"""How much a model loses in codes: a table of folders.

    python benchmarks/quantization.py MODEL FOLDER... --eval eval.tokens.npy

The folders come from `qwen-jax quantize` and `qwen-jax distill`; docs/quantization.md has the
commands. In front of the folders with the same tensors in codes stand two rows of plain rounding of
these tensors. All run in float32 with the numbers that codes stand for. Printed are, over windows
of 512 held-out tokens, the mean divergence KL(float || codes) in nats, how often the most likely
token is the same, and perplexity.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import qwen_jax
from convert.calibrate import at
from convert.methods import dequantise, min_max, round_to_nearest
from convert.model_fit import format_of, tensors_in_codes
from convert.side_files import REPORT
from qwen_jax import CausalLM
from qwen_jax.checkpoint.json_file import read_object
from qwen_jax.cli.provenance import provenance
from qwen_jax.errors import RequestError
from qwen_jax.quant import QTensor, WeightFormat

Rounding = Callable[[jax.Array, WeightFormat], jax.Array]


def _own_levels(weight: jax.Array, format: WeightFormat) -> jax.Array:
    return dequantise(round_to_nearest(weight, format, search=False), format)


MIN_MAX = "min-max, integer grid"
PLAIN: Mapping[str, Rounding] = {MIN_MAX: min_max, "min-max, levels of the codes": _own_levels}
WINDOW = 512
AT_ONCE = 4


def rounded(model: CausalLM, formats: Mapping[str, WeightFormat], rounding: Rounding) -> CausalLM:
    """A model with some matrices rounded, without data."""
    changed = jax.tree.map(lambda x: x, model)
    for path, format in formats.items():
        parameter = at(changed, path)
        parameter.set_value(rounding(parameter[...], format))
    return changed


def in_numbers(model: CausalLM) -> CausalLM:
    """A model with the numbers that its codes stand for."""
    for path, tensor in tensors_in_codes(model).items():
        parent, name = path.rsplit(".", 1)
        setattr(at(model, parent), name, nnx.Param(tensor.dequantise(jnp.float32)))
    return model


def method_of(folder: Path) -> str:
    """How the codes of a folder were made, from its report."""
    report = read_object(folder / REPORT)
    blind = "round-to-nearest"
    methods = sorted(set(report["totals"]["methods"]) - {blind}) or [blind]
    distilled = any(run["new_codes"] for run in report.get("distillation", ()))
    return ", ".join([" + ".join(methods), *["distilled"] * distilled])


def bits_of(tensors: Mapping[str, QTensor]) -> float:
    """Bits of a weight in codes, with scales and all."""
    weights = sum(int(np.prod(tensor.shape)) for tensor in tensors.values())
    return 8 * sum(tensor.nbytes for tensor in tensors.values()) / weights


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
    with jax.default_matmul_precision("highest"):
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


class Table:
    """Rows of figures, printed as they come.

    Args:
        model: the float model.
        windows: what it is compared on.
    """

    def __init__(self, model: CausalLM, windows: np.ndarray) -> None:
        self.rows: list[dict[str, Any]] = []
        self._windows = windows
        self._wanted = [
            _log_probs(model, jnp.asarray(windows[i : i + AT_ONCE]))
            for i in range(0, len(windows), AT_ONCE)
        ]
        print("| recipe | method | bits | mean KL | of min-max | top-1 | perplexity |")
        print("|---|---|---:|---:|---:|---:|---:|", flush=True)

    def add(self, recipe: str, method: str, bits: float, other: CausalLM, first: int) -> None:
        """Measures a model and prints it; `first` is the row that it is compared with."""
        figures = evaluate(self._wanted, other, self._windows)
        row = {"recipe": recipe, "method": method, "bits": bits, **figures}
        self.rows.append(row)
        row["of_min_max"] = figures["mean_kl"] / self.rows[first]["mean_kl"]
        print(
            f"| {recipe} | {method} | {bits:.2f} | {figures['mean_kl']:.4f} | "
            f"{row['of_min_max']:.3f} | {figures['top1_agreement']:.3f} | "
            f"{figures['perplexity']:.2f} |",
            flush=True,
        )


def main() -> None:
    """Print the table and write the results."""
    args = _parser().parse_args()
    model, _ = qwen_jax.load(args.model, dtype="float32")
    table = Table(model, held_out(args.eval, args.eval_windows, args.skip))
    firsts: dict[frozenset, int] = {}
    for folder in args.folders:
        coded, _ = qwen_jax.load(folder, dtype="float32")
        tensors = tensors_in_codes(coded)
        formats = {path: format_of(tensor) for path, tensor in tensors.items()}
        recipe = read_object(folder / REPORT)["recipe"]
        same = frozenset(formats.items())
        if same not in firsts:
            firsts[same] = len(table.rows)
            bits = bits_of({p: _without_factors(t) for p, t in tensors.items()})
            for name, rounding in PLAIN.items():
                plain = rounded(model, formats, rounding)
                table.add(recipe, name, bits, plain, firsts[same])
        bits = bits_of(tensors)
        table.add(recipe, method_of(folder), bits, in_numbers(coded), firsts[same])
        if args.output:
            _write(args, table.rows)


def _without_factors(tensor: QTensor) -> QTensor:
    return QTensor(tensor.codes, tensor.scale, tensor.zero, None, tensor.inputs, tensor.group_size)


def _write(args: argparse.Namespace, rows: Sequence[dict[str, Any]]) -> None:
    report = {
        "benchmark": "quantization",
        **provenance(["python", "benchmarks/quantization.py", Path(args.model).name]),
        "model": Path(args.model).name,
        "window": WINDOW,
        "eval_windows": args.eval_windows,
        "skip": args.skip,
        "reports": {folder.name: _runs(folder) for folder in args.folders},
        "figures": rows,
    }
    args.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def _runs(folder: Path) -> dict[str, Any]:
    """What the report of a folder says of how it was made."""
    report = read_object(folder / REPORT)
    return {name: report.get(name) for name in ("recipe", "calibration", "distillation")}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--eval", type=Path, required=True)
    parser.add_argument("--eval-windows", type=int, default=64)
    parser.add_argument("--skip", type=int, default=16, help="windows that choices were made on")
    parser.add_argument("--output", type=Path)
    return parser


if __name__ == "__main__":
    main()
