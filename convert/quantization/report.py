"""`quantization_report.json`: what became of each tensor, and how well."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import qwen_jax
from qwen_jax.quant import Size, tensor_sizes
from qwen_jax.quant.size import by_part

from .choice import Choice

VERSION = 1


def make_report(
    choice: Choice, calibration: Mapping[str, Any] | None, remarks: Mapping[str, Any]
) -> dict[str, Any]:
    """The content of the file.

    Args:
        choice: what became codes.
        calibration: what is to be said of the calibration text; None without.
        remarks: what is said of each tensor, by tree path.

    Raises:
        RuntimeError: a tensor in codes of which nothing is said, or the reverse.
    """
    if remarks.keys() != choice.scheme.tensors.keys():
        odd = sorted(remarks.keys() ^ choice.scheme.tensors.keys())
        raise RuntimeError(f"internal error: {len(odd)} tensors are not reported: {odd[:20]}")
    tensors = {path: dict(remarks[path]) for path in choice.scheme.tensors}
    seconds = math.fsum(tensor.pop("seconds") for tensor in tensors.values())
    kept = [path for path in choice.tree if path not in tensors]
    return {
        "version": VERSION,
        "program": f"qwen-jax {qwen_jax.__version__}",
        "recipe": choice.recipe.name,
        "calibration": calibration,
        "seconds": round(seconds, 1),
        "totals": _totals(choice, tensors),
        "tensors": tensors,
        "kept": kept,
    }


def _totals(choice: Choice, tensors: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    sizes = tensor_sizes(choice.tree, choice.scheme)
    total = Size.of(sizes)
    without = {path: t["fallback"] for path, t in tensors.items() if t["fallback"]}
    errors = [t["output_error"] for t in tensors.values() if t["output_error"] is not None]
    return {
        "tensors_in_codes": len(tensors),
        "matrices_in_codes": sum(
            math.prod(choice.tree[path].shape[:-2]) for path in choice.scheme.tensors
        ),
        "bytes": total.after,
        "bytes_before": total.before,
        "bits_per_weight": round(total.bits_per_value, 4),
        "parts": {
            part: {"weights": size.values, "bytes": size.after}
            for part, size in by_part(sizes).items()
        },
        "methods": dict(Counter(tensor["method"] for tensor in tensors.values())),
        "mean_weight_error": _mean([tensor["weight_error"] for tensor in tensors.values()]),
        "mean_output_error": _mean(errors),
        "matrices_without_data": sum(map(len, without.values())),
    }


def _mean(values: list[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
