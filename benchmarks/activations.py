"""Quality of activations in few bits: KL to the model itself, by bits and kind of scale.

python benchmarks/activations.py MODEL --calibration train.txt --text eval.npy

Numbers only: inputs are rounded and kept as floats. Calibration takes pieces spread over its file.
"""

from __future__ import annotations

import argparse
import json
import lzma
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import qwen_jax
from qwen_jax.cli.provenance import provenance
from qwen_jax.evaluate import Document, Windows, divergence, read_documents, score
from qwen_jax.evaluate.activation_scales import activation_scales
from qwen_jax.evaluate.activations import with_activations
from qwen_jax.quant import ActivationFormat
from qwen_jax.text import Tokenizer

WINDOW = 512
BITS = (3, 4, 6, 8)


def main() -> None:
    """Prints the table and, with --out, writes it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="model folder")
    parser.add_argument("--calibration", required=True, help="text, or .xz of text")
    parser.add_argument("--text", required=True, help="held-out text or token ids")
    parser.add_argument("--max-windows", type=int, default=16)
    parser.add_argument("--calibration-windows", type=int, default=32)
    parser.add_argument("--out", help="write the rows to this JSON file")
    arguments = parser.parse_args()
    rows = []
    for row in measure(arguments):
        rows.append(row)
        print(
            f"| {row['bits']} | {row['kind']} | {row['mean_kl']:.4f} | "
            f"{row['top1_agreement']:.1%} | {row['perplexity']:.2f} |",
            flush=True,
        )
    if arguments.out:
        result = {"benchmark": "activations", **provenance(sys.argv), "rows": rows}
        Path(arguments.out).write_text(json.dumps(result, indent=2) + "\n")


def measure(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One row for each number of bits and kind."""
    model, tokenizer = qwen_jax.load(arguments.model, dtype="float32")
    assert tokenizer is not None
    documents = read_documents(arguments.text, tokenizer, model.config.vocab_size)
    windows = Windows(documents, window=WINDOW, max_windows=arguments.max_windows)
    calibration = spread(arguments.calibration, tokenizer, arguments.calibration_windows)
    for bits in BITS:
        for kind in ("dynamic", "static"):
            format, scales = ActivationFormat(bits, kind), None
            if kind == "static":
                scales = activation_scales(model, calibration, format)
            rounded = with_activations(model, format, scales)
            result = divergence(score(model, windows), score(rounded, windows))
            yield {
                "bits": bits,
                "kind": kind,
                "mean_kl": result.mean_kl,
                "top1_agreement": result.top1_agreement,
                "perplexity": result.other.perplexity,
                "base_perplexity": result.base.perplexity,
            }


def spread(path: str, tokenizer: Tokenizer, windows: int) -> Windows:
    """Windows from as many places of the text, evenly far apart."""
    opened = lzma.open(path, "rt", encoding="utf-8") if path.endswith(".xz") else open(path)
    with opened as file:
        text = file.read()
    step = len(text) // windows
    # Six characters a token are more than enough.
    pieces = [text[i * step : i * step + 6 * WINDOW] for i in range(windows)]
    documents = [
        Document(f"{path} {i}", np.array(tokenizer.encode(piece)[:WINDOW], np.int32))
        for i, piece in enumerate(pieces)
    ]
    return Windows(documents, window=WINDOW)


if __name__ == "__main__":
    main()
