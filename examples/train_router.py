"""Fine-tunes the routers of the demo model, and nothing else, on text that it is given.

    python examples/train_router.py [TEXT] [--steps 60]

Needs the `train` extra; takes a minute or two on a CPU. Without a text the routers learn from the
docstrings of Python's own library. Prints the loss on pieces of the text that are held out, before
and after; the other 99.7 % of the weights stay bit for bit what they were.
"""

import argparse
import ast
import time
from pathlib import Path

import jax
import numpy as np

import qwen_jax
from qwen_jax.train import (
    AdamW,
    Data,
    NextTokens,
    Schedule,
    Trainer,
    Training,
    held_out_batches,
    joined,
    parameters_of,
    split,
)
from qwen_jax.train.parameters import count
from qwen_jax.train.run import Run

ROWS, WINDOW = 8, 128
HELD_OUT = 12  # one piece of so many


def pieces_of_the_library() -> list[str]:
    """Docstrings of the modules, classes and functions of Python's standard library."""
    found = {}
    for file in sorted(Path(ast.__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = ast.get_docstring(node) or ""
                found |= {text: None} if len(text) > 200 else {}
    return list(found)


def main() -> None:
    """Looks, trains, looks again."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", nargs="?", type=Path)
    parser.add_argument("--steps", type=int, default=60)
    asked = parser.parse_args()
    begin = time.monotonic()

    model, tokenizer = qwen_jax.load("demo", dtype="float32", implementation="reference")
    if asked.text is None:
        pieces = pieces_of_the_library()
    else:
        pieces = asked.text.read_text(encoding="utf-8").split("\n\n")
    documents = [np.array(tokenizer.encode(piece), np.int32) for piece in pieces]
    end = model.config.eos_token_id[0]
    learned = joined([one for i, one in enumerate(documents) if i % HELD_OUT], end)
    watched = joined(documents[::HELD_OUT], end)
    parts = split(parameters_of(model), ["*.mlp.gate.weight"])
    total = count(parts.trained) + count(parts.fixed)
    print(
        f"{count(parts.trained):,} of {total:,} parameters, {len(learned):,} tokens of text",
        flush=True,
    )

    run = Run(
        trainer=Trainer(
            model, Training(AdamW(decay=0.0), NextTokens(balance=0.002), recompute=False)
        ),
        data=Data(learned, ROWS, WINDOW),
        schedule=Schedule(steps=asked.steps, rate=2e-3, warmup=5),
        fixed=parts.fixed,
        held_out=held_out_batches(watched, ROWS, WINDOW)[:8],
    )
    state = run.trainer.start(parts.trained)
    print(f"before: loss {run.look(state):.4f} on what is held out", flush=True)

    def tell(step: int, figures: dict) -> None:
        if step in (1, asked.steps) or step % 20 == 0:
            loss, balance = figures["loss"][-1], figures["balance"][-1]
            print(f"step {step}: loss {loss:.4f}, balance {balance:.3f}", flush=True)

    state = run.go(state, tell=tell)
    print(f"after: loss {run.look(state):.4f} on what is held out")
    moved = max(
        float(abs(state.trained[name] - parts.trained[name].astype("float32")).max())
        for name in state.trained
    )
    print(f"routers moved by at most {moved:.3f}; {time.monotonic() - begin:.0f} s in all")
    trained = run.trainer.model(state.trained, parts.fixed)
    routing = jax.jit(lambda model, ids: model(ids, capture="ids").routing)(
        trained, watched[None, :512]
    )
    print("experts used in layer 0:", np.bincount(routing[0].ids.ravel(), minlength=16).tolist())


if __name__ == "__main__":
    main()
