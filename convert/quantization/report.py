"""`quantization_report.json`: what became of each tensor, and how well."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import qwen_jax
from qwen_jax.checkpoint.json_file import read_object
from qwen_jax.errors import CheckpointError
from qwen_jax.quant import Scheme, Size, tensor_sizes
from qwen_jax.quant.size import by_part

from ..side_files import REPORT
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
    tensors = {
        path: {**remarks[path], "input_scale": choice.input_scale(path)}
        for path in choice.scheme.tensors
    }
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


def read_report(folder: Path, scheme: Scheme) -> dict[str, Any]:
    """The report in a folder in codes.

    Args:
        folder: the folder.
        scheme: what is in codes there.

    Raises:
        CheckpointError: there is none, or it is of another version or of other tensors.
    """
    if not (folder / REPORT).is_file():
        raise CheckpointError(
            f"{folder} has no {REPORT}, which says how its codes were made; fetch it with the rest "
            "of the folder"
        )
    report = read_object(folder / REPORT)
    rows = report.get("tensors")
    known = rows.keys() if isinstance(rows, dict) else set()
    if report.get("version") != VERSION or known != scheme.tensors.keys():
        raise CheckpointError(
            f"{folder / REPORT} is damaged, or is not about the tensors of this folder; fetch it "
            "again, all files from one revision"
        )
    return report


def distilled_report(
    before: Mapping[str, Any],
    done: Mapping[str, Any],
    rows: Mapping[str, tuple[float, float]],
) -> dict[str, Any]:
    """The content of the file once codes were fitted to a teacher.

    Args:
        before: the source's.
        done: what is to be said of the fit.
        rows: of each tensor with new codes the error of its weights and the share clipped; errors
            of outputs are not known any more.
    """
    tensors = {path: dict(row) for path, row in before["tensors"].items()}
    for path, (missed, clipped) in rows.items():
        tensors[path] |= {"weight_error": missed, "clipped": clipped, "output_error": None}
    totals = {**before.get("totals", {}), **_mean_errors(tensors)}
    return {
        **before,
        "program": f"qwen-jax {qwen_jax.__version__}",
        "distillation": [*before.get("distillation", ()), dict(done)],
        "totals": totals,
        "tensors": tensors,
    }


def _mean_errors(tensors: Mapping[str, Mapping[str, Any]]) -> dict[str, float | None]:
    """Over all tensors of which they are known."""
    means = {}
    for name in ("weight_error", "output_error"):
        means[f"mean_{name}"] = _mean([t[name] for t in tensors.values() if t[name] is not None])
    return means


def _totals(choice: Choice, tensors: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    sizes = tensor_sizes(choice.tree, choice.scheme)
    total = Size.of(sizes)
    without = {path: t["fallback"] for path, t in tensors.items() if t["fallback"]}
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
        **_mean_errors(tensors),
        "matrices_without_data": sum(map(len, without.values())),
    }


def _mean(values: list[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
