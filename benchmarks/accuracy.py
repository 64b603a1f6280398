"""Is the whole model right on a GPU? Kernels against the reference, and both against float32.

    python benchmarks/accuracy.py [--checkpoint demo FOLDER...] [--output FILE]

First a cut of a released shape with random weights: logits of a prompt, steps of ragged batches,
the same run three times (equal bit for bit), and a sequence in a batch against itself alone. Then
each trained checkpoint, as it is stored: held-out text and greedy tokens. The weights stay in
memory in float32 too, so checkpoints should be small. Prints the figures and exits with 1 where
one misses its bar.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from qwen_jax.cli import guarded
from qwen_jax.cli.environment import prepare_environment
from qwen_jax.errors import RequestError

if TYPE_CHECKING:
    import numpy as np

    from benchmarks.accuracy_cases import Case

GOLDEN = Path(__file__).parents[1] / "tests" / "golden"


def main() -> int:
    """Measures what the arguments say; 1 where a bar is missed."""
    prepare_environment()
    return guarded(_accuracy)


def _accuracy() -> int:
    arguments = _parser().parse_args()
    import jax

    if jax.default_backend() != "gpu":
        raise SystemExit(f"needs a GPU, and JAX sees {jax.default_backend()}")
    # Read first: a file that will not do is found before minutes of compilation.
    text, prompts = read_text(arguments.eval_tokens), read_prompts(arguments.prompts)
    result = description(arguments)
    wrong = _kept(random_name(arguments), _random(arguments), result, arguments.output)
    for checkpoint in arguments.checkpoint:
        # The models before may lie in cycles, and so in the device's memory.
        gc.collect()
        cases = _trained(checkpoint, text, prompts)
        wrong += _kept(named(checkpoint), cases, result, arguments.output)
    print("\n".join(f"MISSED {name}" for name in wrong) or "all bars are met")
    return int(bool(wrong))


def _kept(
    model: str, cases: Iterable[Case], result: dict[str, Any], output: Path | None
) -> list[str]:
    """Keeps the figures of a model's cases; returns those that miss their bar."""
    figures = result["figures"][model] = {}
    for name, row in cases:
        figures[name] = row
        print(f"{model}: {name}: {json.dumps(row)}", flush=True)
        if output is not None:
            # After each case, so that a run that is cut off keeps some.
            output.parent.mkdir(parents=True, exist_ok=True)
            output.write_text(json.dumps(result, indent=2) + "\n")
    return [f"{model}: {name}" for name, row in figures.items() if not row["right"]]


def description(arguments: argparse.Namespace) -> dict[str, Any]:
    """What is measured, and where, without figures and without paths of this machine."""
    from benchmarks.accuracy_figures import BAR, CLEAR
    from qwen_jax.cli.provenance import provenance

    request = {
        "preset": arguments.preset,
        "layers": arguments.layers,
        "recipe": arguments.recipe,
        "checkpoint": [named(checkpoint) for checkpoint in arguments.checkpoint],
        "eval_tokens": arguments.eval_tokens.name,
        "prompts": arguments.prompts.name,
    }
    command = ["python", "benchmarks/accuracy.py"]
    for name, value in request.items():
        given = getattr(arguments, name)
        if given != _parser().get_default(name):
            values = value if isinstance(value, list) else [str(value)]
            command += [f"--{name.replace('_', '-')}", *values]
    result = {"benchmark": "accuracy", **provenance(command)}
    result["commit"] = arguments.commit or result["commit"]
    return result | {"request": request, "mean_kl": BAR, "clear": CLEAR, "figures": {}}


def named(checkpoint: str) -> str:
    """A checkpoint's name: the last part of its path."""
    return Path(checkpoint).resolve().name


def random_name(arguments: argparse.Namespace) -> str:
    """What the model with random weights is called."""
    codes = "" if arguments.recipe == "none" else f", {arguments.recipe}"
    return f"{arguments.preset}, {arguments.layers} layers{codes}, random weights"


def _random(arguments: argparse.Namespace) -> Iterable[Case]:
    import jax

    from benchmarks.accuracy_cases import RandomSizes, random_cases
    from benchmarks.accuracy_runs import Runs
    from qwen_jax import QwenConfig, initialise
    from qwen_jax.cli.measure import first_layers
    from qwen_jax.quant import named_recipe

    config = first_layers(QwenConfig.preset(arguments.preset), arguments.layers)
    recipe = None if arguments.recipe == "none" else named_recipe(arguments.recipe)
    return random_cases(Runs(initialise(config, jax.random.key(0), recipe)), RandomSizes())


def _trained(checkpoint: str, text: np.ndarray, prompts: dict[str, list[int]]) -> Iterable[Case]:
    import qwen_jax
    from benchmarks.accuracy_cases import TrainedSizes, trained_cases
    from benchmarks.accuracy_runs import Runs

    runs = Runs(qwen_jax.load(checkpoint)[0])
    vocabulary = runs.models["kernels"].config.vocab_size
    largest = max(int(text.max()), *(max(ids) for ids in prompts.values()))
    if largest >= vocabulary:
        raise RequestError(
            f"{checkpoint} has {vocabulary} tokens, and the largest id given is {largest}; name "
            "text and prompts of its tokenizer by --eval-tokens and --prompts"
        )
    return trained_cases(runs, text, prompts, TrainedSizes())


def read_text(file: Path) -> np.ndarray:
    """Held-out ids of a .npy file.

    Raises:
        RequestError: no array [N] of integers, or too few of them.
    """
    import numpy as np

    from benchmarks.accuracy_cases import TrainedSizes

    text, fewest = np.load(file), TrainedSizes().tokens
    if text.ndim != 1 or text.size < fewest or not np.issubdtype(text.dtype, np.integer):
        raise RequestError(
            f"{file.name} holds {text.dtype} {text.shape}; needed are {fewest} ids or more in a row"
        )
    return text


def read_prompts(file: Path) -> dict[str, list[int]]:
    """Ids by name, of the prompts that the file has greedy tokens of; see `parity.py`.

    Raises:
        RequestError: no prompts, an empty one, or one that is too long.
    """
    from benchmarks.accuracy_cases import TrainedSizes

    content = json.loads(file.read_text(encoding="utf-8"))
    prompts = {name: content["prompts"][name] for name in content["greedy"]}
    most = TrainedSizes().together
    if not prompts:
        raise RequestError(f"{file.name} names no prompts under 'greedy'; needed is one or more")
    for name, ids in prompts.items():
        if not 1 <= len(ids) <= most:
            raise RequestError(
                f"prompt {name!r} of {file.name} has {len(ids)} tokens; accepted are 1 to {most}"
            )
    return prompts


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Compare kernels, reference and float32 of a whole model on a GPU."
    )
    parser.add_argument("--preset", default="qwen3.6-35b-a3b", help="shape of the random weights")
    parser.add_argument("--layers", type=int, default=4, help="how many of its layers")
    parser.add_argument("--recipe", default="q3", help="codes of the random weights, or none")
    parser.add_argument(
        "--checkpoint", nargs="*", default=["demo"], help="folders of trained weights, or demo"
    )
    parser.add_argument(
        "--eval-tokens",
        type=Path,
        default=GOLDEN / "demo.eval_tokens.npy",
        help="ids of held-out text, by the checkpoints' tokenizer; the demo's if not given",
    )
    parser.add_argument(
        "--prompts",
        type=Path,
        default=GOLDEN / "demo.expected.json",
        help="prompts for greedy tokens, as benchmarks/parity.py reads them",
    )
    parser.add_argument("--output", type=Path, help="file to write the JSON result to")
    parser.add_argument("--commit", help="the commit, if the code is a copy without history")
    return parser


if __name__ == "__main__":
    sys.exit(main())
