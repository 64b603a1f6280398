"""Trains a model of the demo's shape from text and writes it in the Hugging Face layout.

    python examples/train_demo.py --text TRAIN.txt.xz --out FOLDER [--seconds 540]

Needs the `train` extra. On one GPU of a data centre it takes the time that it is given; on a CPU a
smaller number of --epochs. What it watches is held out of the same text; --eval-tokens, ids that
were never trained on, are looked at once more at the end, in windows of 512.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import lzma
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import jax
import numpy as np

import qwen_jax
from convert.trained import write_new
from qwen_jax import QwenConfig, initialise
from qwen_jax.model import CausalLM, parameter_shapes
from qwen_jax.text import Tokenizer
from qwen_jax.train import (
    AdamW,
    Batch,
    Data,
    NextTokens,
    Schedule,
    Trainer,
    Training,
    TrainState,
    held_out_batches,
    joined,
    parameters_of,
    split,
)

DEMO = Path(qwen_jax.__path__[0]) / "demo"
EVAL_WINDOWS, EVAL_WINDOW = 16, 512
HELD_OUT = 50  # one piece of so many
TELL_EVERY = 30.0
TIMED_CALLS = 6  # of the compiled program; the first one compiles
SECONDS_AFTERWARDS = 30  # to write the folder and look at it


def main() -> None:
    """Reads, trains, writes, and looks at what was written."""
    asked, begin = arguments(), time.monotonic()
    train, held_out = tokens_of(Path(asked.text), asked.processes)
    print(
        f"{len(train):,} tokens to train on, {len(held_out):,} held out, "
        f"{time.monotonic() - begin:.0f} s",
        flush=True,
    )
    config = dataclasses.replace(
        QwenConfig.from_hf(DEMO), dtype=asked.dtype, implementation="reference"
    )
    trainer = Trainer(
        CausalLM(config),
        Training(
            AdamW(decay=asked.decay),
            NextTokens(balance=config.router_aux_loss_coef, router_z=asked.z),
            expert_dropout=asked.expert_dropout,
            recompute=False,
            seed=asked.seed,
        ),
    )
    data = Data(train, asked.rows, asked.window, asked.seed)
    watched = held_out_batches(held_out, max(1, 2**16 // asked.window), asked.window)
    parameters, steps = descend(trainer, data, watched, asked, begin)
    folder = Path(asked.out) / "model"
    write_new(config, stored(parameters, config), folder, tokenizer=DEMO)
    result = {"steps": steps, "elapsed": round(time.monotonic() - begin, 1), **vars(asked)}
    result["held_out"] = nll(folder, held_out, len(held_out) // EVAL_WINDOW)
    if asked.eval_tokens:
        ids = np.load(asked.eval_tokens).reshape(-1)
        result["eval_nll_16x512"] = nll(folder, ids, EVAL_WINDOWS)
        result["eval_nll_demo"] = nll(DEMO, ids, EVAL_WINDOWS)
        if len(ids) >= 128 * EVAL_WINDOW:
            result["eval_nll_all"] = nll(folder, ids, len(ids) // EVAL_WINDOW)
            result["eval_nll_all_demo"] = nll(DEMO, ids, len(ids) // EVAL_WINDOW)
    (Path(asked.out) / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1), flush=True)
    compare_with_transformers(folder, held_out[:200])


def arguments() -> argparse.Namespace:
    """What was asked for on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", required=True, help="text, perhaps .xz")
    parser.add_argument("--out", required=True, help="folder for model/ and result.json")
    parser.add_argument("--eval-tokens", help=".npy of ids")
    parser.add_argument("--seconds", type=float, default=540.0, help="for all of it")
    parser.add_argument("--epochs", type=float, default=24.0, help="at most")
    parser.add_argument("--rows", type=int, default=16, help="windows of a step")
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--steps-at-once", type=int, default=20, help="in one compiled program")
    parser.add_argument("--rate", type=float, default=4e-3)
    parser.add_argument("--warmup", type=int, default=200)
    parser.add_argument("--decay", type=float, default=0.2)
    parser.add_argument("--z", type=float, default=1e-4, help="weight of the router z-loss")
    parser.add_argument("--expert-dropout", type=float, default=0.0)
    parser.add_argument("--dtype", default="bfloat16", help="of the computation")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=8, help="that make tokens of text")
    return parser.parse_args()


def descend(
    trainer: Trainer, data: Data, watched: Batch, asked: argparse.Namespace, begin: float
) -> tuple[dict, int]:
    """Takes as many steps as there is time for; the trained parameters and their number."""
    random = initialise(
        dataclasses.replace(trainer.skeleton.config, dtype="float32"), jax.random.key(asked.seed)
    )
    state = trainer.start(split(parameters_of(random)).trained)
    wanted, at_once = int(asked.epochs * data.steps_per_epoch), asked.steps_at_once
    schedule = Schedule(wanted, asked.rate, min(asked.warmup, wanted), final=0.0)
    step, told, timed = 0, 0.0, 0.0
    while step < schedule.steps:
        rates = schedule.rates(step, at_once)
        state, found = trainer.steps(state, {}, data.batches(step, at_once), rates)
        found = jax.device_get(found)  # waits: calls must not run ahead of the clock
        step += at_once
        if step == TIMED_CALLS * at_once:
            a_step = (time.monotonic() - timed) / (step - at_once)
            left = begin + asked.seconds - time.monotonic() - SECONDS_AFTERWARDS
            fit = max(step + at_once, step + int(left / a_step))
            fit = min(wanted, fit)
            schedule = dataclasses.replace(schedule, steps=fit, warmup=min(schedule.warmup, fit))
            print(
                f"{1e3 * a_step:.1f} ms a step, {data.rows * data.window / a_step:,.0f} tokens/s: "
                f"{schedule.steps:,} steps, {schedule.steps / data.steps_per_epoch:.1f} epochs",
                flush=True,
            )
        now = time.monotonic()
        if step == at_once or (step > TIMED_CALLS * at_once and now - told > TELL_EVERY):
            tell(trainer, state, watched, found, begin, step / data.steps_per_epoch)
            told = time.monotonic()
        if step == at_once:
            timed = time.monotonic()
    tell(trainer, state, watched, found, begin, step / data.steps_per_epoch)
    return state.trained, step


def tell(
    trainer: Trainer,
    state: TrainState,
    watched: list[Batch],
    found: dict,
    begin: float,
    epoch: float,
) -> None:
    """One line: losses of the newest steps, and the loss over what is watched."""
    sums = sum(np.asarray(trainer.loss(state.trained, {}, part)) for part in watched)
    newest = {name: float(np.mean(value)) for name, value in found.items()}
    print(
        f"{time.monotonic() - begin:6.0f} s  step {int(state.step):6,}  epoch {epoch:6.2f}  "
        f"loss {newest['loss']:.4f}  held out {sums[0] / sums[1]:.4f}  "
        f"balance {newest['balance']:.3f}  z {newest['router_z']:.2f}",
        flush=True,
    )


def tokens_of(text: Path, processes: int) -> tuple[np.ndarray, np.ndarray]:
    """Token ids to train on and to watch: the text in pieces, in an order of their own.

    Pieces begin and end anywhere between lines, and each is followed by the end of text, so that
    the model learns what it may not know at a window's beginning.
    """
    raw = text.read_bytes()
    content = (lzma.decompress(raw) if text.suffix == ".xz" else raw).decode()
    random, pieces, lines, room = np.random.default_rng(7), [], [], 0
    for line in content.splitlines(keepends=True):
        if room <= 0:
            pieces.append("".join(lines).strip("\n"))
            lines, room = [], int(random.integers(1500, 6000))
        lines.append(line)
        room -= len(line)
    pieces.append("".join(lines).strip("\n"))
    pieces = [pieces[i] for i in random.permutation(len(pieces)) if pieces[i]]
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        ids = list(pool.map(encoded, [pieces[i::64] for i in range(64)]))
    documents = [ids[i % 64][i // 64] for i in range(len(pieces))]
    end = QwenConfig.from_hf(DEMO).bos_token_id
    train = [document for i, document in enumerate(documents) if i % HELD_OUT]
    return joined(train, end), joined(documents[::HELD_OUT], end)


def encoded(pieces: list[str]) -> list[np.ndarray]:
    """Token ids of each."""
    tokenizer = Tokenizer.from_folder(DEMO)
    assert tokenizer is not None
    return [np.array(tokenizer.encode(piece), np.int32) for piece in pieces]


def stored(parameters: dict, config: QwenConfig) -> dict[str, np.ndarray]:
    """The parameters as they go to the file, in bfloat16 but for what stays float32."""
    dtypes = parameter_shapes(dataclasses.replace(config, dtype="bfloat16"))
    return {
        name: np.asarray(value.astype(dtypes[name].dtype)) for name, value in parameters.items()
    }


def nll(folder: Path, ids: np.ndarray, count: int) -> float:
    """Mean loss of a stored model in nats, in float32, over windows of 512 with 511 predictions."""
    model, _ = qwen_jax.load(folder, dtype="float32", implementation="reference")
    rows = ids[: count * EVAL_WINDOW].astype(np.int32).reshape(count, EVAL_WINDOW)
    found = []
    with jax.default_matmul_precision("highest"):
        for row in range(0, count, EVAL_WINDOWS):
            part = np.resize(rows[row : row + EVAL_WINDOWS], (EVAL_WINDOWS, EVAL_WINDOW))
            odds = jax.nn.log_softmax(model(part, capture="none").logits[:, :-1], axis=-1)
            chosen = np.take_along_axis(np.asarray(odds), part[:, 1:, None], axis=-1)[..., 0]
            found.append(-chosen[: count - row])
    return float(np.concatenate(found).astype(np.float64).mean())


def compare_with_transformers(folder: Path, ids: np.ndarray) -> None:
    """Says how far the logits that transformers computes with the folder are from ours."""
    try:
        import torch
        import transformers
    except ImportError:
        print("transformers is not installed: not compared with it")
        return
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True, attn_implementation="eager"
    )
    with torch.no_grad():
        wanted = theirs(torch.from_numpy(ids[None].astype(np.int64))).logits.numpy()
    model, _ = qwen_jax.load(folder, dtype="float32", implementation="reference")
    with jax.default_matmul_precision("highest"):
        found = np.asarray(model(ids[None]).logits)
    faults = [
        key for kind in ("missing", "unexpected", "mismatched") for key in report[kind + "_keys"]
    ]
    difference = float(np.abs(found - wanted).max() / wanted.std())
    print(
        f"transformers {transformers.__version__}: largest difference of {len(ids)} tokens' logits "
        f"{difference:.1e} of their standard deviation; keys that do not fit: {faults or 'none'}"
    )


if __name__ == "__main__":
    main()
