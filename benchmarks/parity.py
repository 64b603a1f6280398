"""Does a model folder give transformers' numbers? Compares it in float32 with stored arrays.

    python benchmarks/parity.py FOLDER EXPECTED_PREFIX [--eval-tokens FILE.npy] [--out RESULT.json]

Reads EXPECTED_PREFIX.json and EXPECTED_PREFIX.npz, prints one line a figure with its bar, and exits
with 1 when a figure misses its bar. Run it on a CPU.

EXPECTED_PREFIX.json holds `prompts` (name -> ids), `greedy` (name -> greedy ids after that prompt),
`aux_loss_NAME` and `eval_nll_16x512`; the npz holds, for each prompt, `NAME.logits_last8`,
`NAME.logsumexp`, `NAME.argmax`, `NAME.next_token_logprob`, `NAME.hidden_last` and perhaps
`NAME.expert_counts`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import qwen_jax
from qwen_jax.model import CausalLM, ModelOutput, Routing

RELATIVE_BAR = 1e-3  # of the standard deviation of what is compared
LOSS_BAR = 1e-4
# Two greedy tokens, or two experts, may change places where they are as close as this.
CLOSE_TOKENS = 1e-2
CLOSE_EXPERTS = 1e-5
WINDOWS, WINDOW = 16, 512


@dataclass(frozen=True)
class Figure:
    """One number against its bar: `array` says what was compared, `value` may be up to `bar`."""

    array: str
    measure: str
    value: float
    bar: float

    @property
    def passed(self) -> bool:
        """Whether the number is within its bar; NaN is not."""
        return self.value <= self.bar


@dataclass(frozen=True)
class Expected:
    """What transformers computed: the content of the json and of the npz file."""

    values: dict[str, Any]
    arrays: dict[str, np.ndarray]

    @property
    def prompts(self) -> dict[str, list[int]]:
        """Token ids by name."""
        return self.values["prompts"]


def read_expected(prefix: str | Path) -> Expected:
    """Reads `prefix`.json and `prefix`.npz."""
    values = json.loads(Path(f"{prefix}.json").read_text(encoding="utf-8"))
    with np.load(f"{prefix}.npz") as arrays:
        return Expected(values, dict(arrays))


def run_prompts(model: CausalLM, prompts: Sequence[Sequence[int]], width: int = 0) -> ModelOutput:
    """All prompts as one ragged batch without a cache, with routing and hidden states."""
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    tokens = np.zeros((len(prompts), max(width, lengths.max())), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    return model(tokens, lengths, output_hidden_states=True)


def prompt_figures(expected: Expected, output: ModelOutput) -> Iterator[Figure]:
    """Every array of the npz file against the output of `run_prompts` over its prompts."""
    for row, (name, prompt) in enumerate(expected.prompts.items()):
        length, arrays = len(prompt), expected.arrays
        logits = np.asarray(output.logits[row, :length])
        total = np.asarray(jax.nn.logsumexp(output.logits[row, :length], axis=-1))
        chosen = logits[np.arange(length - 1), prompt[1:]] - total[:-1]
        std = arrays[f"{name}.logits_last8"].std()
        for array, found in (
            (f"{name}.logits_last8", logits[-8:]),
            (f"{name}.logsumexp", total),
            (f"{name}.next_token_logprob", chosen),
        ):
            yield _relative(array, found, arrays[array], std)
        yield _argmax(f"{name}.argmax", logits, arrays)
        yield _hidden(f"{name}.hidden_last", output, row, length, arrays)
        if f"{name}.expert_counts" in arrays:
            yield _counts(f"{name}.expert_counts", output, row, length, arrays)
        if f"aux_loss_{name}" in expected.values:
            valid = np.zeros(output.logits.shape[:2], bool)
            valid[row, :length] = True
            loss = balance_loss(output.routing, valid)
            difference = abs(loss - expected.values[f"aux_loss_{name}"])
            yield Figure(f"aux_loss_{name}", "|difference|", difference, LOSS_BAR)


def _relative(name: str, found: np.ndarray, wanted: np.ndarray, std: float | np.ndarray) -> Figure:
    """Largest difference over `std`; an array of another shape misses the bar."""
    value = np.inf
    if found.shape == wanted.shape:
        value = float((np.abs(found - wanted) / std).max(initial=0.0))
    return Figure(name, "|difference| / std", value, RELATIVE_BAR)


def _argmax(name: str, logits: np.ndarray, arrays: dict[str, np.ndarray]) -> Figure:
    """Number of positions with another best token, where the best two are apart."""
    second, first = np.sort(logits, axis=-1)[:, -2:].T
    differs = logits.argmax(-1) != arrays[name]
    return Figure(name, "wrong tokens", int((differs & (first - second > CLOSE_TOKENS)).sum()), 0)


def _hidden(
    name: str, output: ModelOutput, row: int, length: int, arrays: dict[str, np.ndarray]
) -> Figure:
    """Hidden states of the last token, each layer relative to its own spread."""
    states = output.hidden_states or ()
    found = np.stack([np.asarray(state[row, length - 1]) for state in states])
    return _relative(name, found, arrays[name], arrays[name].std(axis=-1, keepdims=True))


def _counts(
    name: str, output: ModelOutput, row: int, length: int, arrays: dict[str, np.ndarray]
) -> Figure:
    """Tokens with another set of experts, by how often each expert was chosen in each layer.

    A token whose last chosen and first unchosen expert are close may change one for the other,
    which moves two counts.
    """
    wrong = 0
    for routing, wanted in zip(output.routing.values(), arrays[name], strict=True):
        ids = np.asarray(routing.ids[row, :length])
        ranked = np.sort(np.asarray(routing.logits[row, :length]), axis=-1)[:, ::-1]
        chosen = ids.shape[-1]
        close = int((ranked[:, chosen - 1] - ranked[:, chosen] < CLOSE_EXPERTS).sum())
        moved = int(np.abs(np.bincount(ids.ravel(), minlength=len(wanted)) - wanted).sum())
        wrong = max(wrong, moved - 2 * close)
    return Figure(name, "counts moved", wrong, 0)


def balance_loss(routing: dict[int, Routing], valid: np.ndarray) -> float:
    """The load-balancing loss of transformers, all layers pooled, over the tokens in `valid`.

    With f_e the share of (layer, token) pairs that chose expert e and P_e the mean probability of
    e, the loss is E * sum_e f_e P_e (Fedus et al., arXiv 2101.03961, with pooled layers).
    """
    chosen, probability = [], []
    for choice in routing.values():
        logits = np.asarray(choice.logits)[valid].astype(np.float64)
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        probability.append(weights / weights.sum(-1, keepdims=True))
        chosen.append(np.asarray(choice.ids)[valid])
    pooled = np.concatenate(probability)
    experts = pooled.shape[-1]
    share = np.bincount(np.concatenate(chosen).ravel(), minlength=experts) / len(pooled)
    return float(experts * share @ pooled.mean(0))


def greedy_figures(model: CausalLM, expected: Expected) -> Iterator[Figure]:
    """Greedy ids by `qwen_jax.generate`, up to the first that is a close call."""
    wanted = expected.values["greedy"]
    prompts = [expected.prompts[name] for name in wanted]
    most = max(len(ids) for ids in wanted.values())
    results = qwen_jax.generate(model, None, prompts, max_tokens=most, ignore_eos=True)
    for (name, ids), prompt, result in zip(wanted.items(), prompts, results, strict=True):
        same = [a == b for a, b in zip(ids, result.tokens[: len(ids)], strict=True)]
        wrong = len(same) - sum(same)
        if wrong and _margin(model, prompt + ids[: same.index(False)]) <= CLOSE_TOKENS:
            wrong = 0
        yield Figure(f"greedy.{name}", "wrong tokens", wrong, 0)


def _margin(model: CausalLM, tokens: list[int]) -> float:
    """Distance of the two largest logits after the tokens."""
    second, first = np.sort(np.asarray(model(np.array([tokens], np.int32)).logits[0, -1]))[-2:]
    return float(first - second)


def loss_figure(
    model: CausalLM, expected: Expected, tokens: np.ndarray, *, width: int = WINDOW, rows: int = 8
) -> Figure:
    """Mean next-token loss of 16 windows of 512 tokens, each window alone.

    Args:
        model: the model.
        expected: holds the loss of transformers.
        tokens: at least 16 * 512 ids.
        width: windows are padded to it, so that a program compiled for other prompts serves.
        rows: windows a forward pass.
    """
    windows = tokens[: WINDOWS * WINDOW].reshape(WINDOWS, WINDOW).astype(np.int32)
    losses = []
    for begin in range(0, WINDOWS, rows):
        batch = windows[begin : begin + rows]
        logits = run_prompts(model, batch, width).logits[:, : WINDOW - 1]
        target = jnp.asarray(batch[:, 1:, None])
        chosen = jnp.take_along_axis(logits, target, axis=-1)[..., 0]
        losses.append(np.asarray(jax.nn.logsumexp(logits, axis=-1) - chosen, np.float64))
    loss = float(np.concatenate(losses).mean())
    difference = abs(loss - expected.values["eval_nll_16x512"])
    return Figure("eval_nll_16x512", "|difference|", difference, LOSS_BAR)


def all_figures(
    model: CausalLM, expected: Expected, eval_tokens: np.ndarray | None
) -> Iterator[Figure]:
    """Every figure that the files allow."""
    prompts = list(expected.prompts.values())
    width = max(map(len, prompts))
    if eval_tokens is not None:
        width = max(width, WINDOW)
        yield loss_figure(model, expected, eval_tokens, width=width, rows=len(prompts))
    yield from prompt_figures(expected, run_prompts(model, prompts, width))
    yield from greedy_figures(model, expected)


def main() -> int:
    """Runs the comparison."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", help="model folder")
    parser.add_argument("expected", help="path of the expected files without .json and .npz")
    parser.add_argument("--eval-tokens", help="token ids of the evaluation text, .npy")
    parser.add_argument("--out", help="write the figures to this JSON file")
    arguments = parser.parse_args()

    expected = read_expected(arguments.expected)
    tokens = None if arguments.eval_tokens is None else np.load(arguments.eval_tokens)
    figures = []
    with jax.default_matmul_precision("highest"):
        model, _ = qwen_jax.load(arguments.folder, dtype="float32")
        for figure in all_figures(model, expected, tokens):
            figures.append(figure)
            verdict = "" if figure.passed else "MISS"
            print(
                f"{figure.array:26} {figure.measure:18} {figure.value:9.2e} "
                f"bar {figure.bar:.0e} {verdict}",
                flush=True,
            )
    missed = [figure.array for figure in figures if not figure.passed]
    print(f"{len(figures) - len(missed)} of {len(figures)} within their bars")
    if arguments.out:
        _write(arguments.out, figures)
    return 1 if missed else 0


def _write(path: str, figures: Sequence[Figure]) -> None:
    """The figures and where they come from, as JSON."""
    from qwen_jax.cli.provenance import provenance

    report = {
        "benchmark": "parity",
        **provenance(["python", *sys.argv]),
        "figures": [asdict(figure) | {"passed": figure.passed} for figure in figures],
    }
    Path(path).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
