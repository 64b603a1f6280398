"""From a folder in codes to one whose codes were fitted to what the float model predicts.

The fit has both models whole in device memory (`model_fit`). Nothing is written before it is done,
and none of it is kept when a run is interrupted: the folder is there whole or not at all.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from qwen_jax.checkpoint.problems import show
from qwen_jax.errors import MemoryLimitError
from qwen_jax.loading import load
from qwen_jax.memory import available_memory
from qwen_jax.model import CausalLM

from . import model_fit
from .calibrate import at
from .distillation_plan import DistillationPlan, text_of
from .model_fit import divided, fit_model, format_of, judged, tensors_in_codes
from .quantization.fitted import fitted_tensors
from .quantization.packed import packed_parts
from .quantization.report import distilled_report
from .quantization.weights import Weights
from .run import check, run, source_compared
from .teacher import fold_teacher, plan_teacher, refuse_other_teacher
from .tuning import Fit, Start
from .writing import Written


@dataclass(frozen=True)
class Distilled:
    """What `distill` did.

    Attributes:
        written: the folder.
        fit: the codes, and the mean KL over windows held out before and after.
    """

    written: Written
    fit: Fit


def distill(
    plan: DistillationPlan,
    destination: Path,
    *,
    max_shard_bytes: int,
    progress: Callable[[int], None] = lambda nbytes: None,
    tell: Callable[[str], None] = lambda text: None,
) -> Distilled:
    """Fits the codes and writes the folder of a plan.

    Args:
        plan: what to write.
        destination: the folder to be; it must not exist.
        max_shard_bytes: most bytes of tensors in a file; no file holds tensors of two layers.
        progress: called with the bytes written since the last call.
        tell: called with a line now and then.

    Raises:
        CheckpointError: as `run.run` does; checksums or the teacher do not fit the codes; or a
            weight of the teacher is not finite.
        MemoryLimitError: the device is too small; nothing was loaded.
    """
    check(plan, destination, resume=False)
    _refuse_memory(plan)
    begin = time.monotonic()
    # First of all: with NaN in the teacher no codes are better, which would show after all steps.
    tell("looking for weights of the teacher that are damaged or not finite")
    with source_compared(plan):
        Weights(plan_teacher(plan.teacher, plan.load)).refuse_bad()
        model, _ = load(plan.source, dtype="float32")
    teacher, _ = load(plan.teacher, dtype="float32")
    fold_teacher(model, teacher, plan.report_before)
    refuse_other_teacher(model, teacher)
    fit = fit_model(
        model,
        teacher,
        plan.calibration.tokens,
        steps=plan.steps,
        windows_of_step=plan.windows_of_step,
        tell=tell,
    )
    tell(_outcome(fit))
    report = _report(plan, model, teacher, fit, time.monotonic() - begin)
    packed = _packed(plan, model, fit)
    del model, teacher
    written = run(
        dataclasses.replace(
            plan, tensors=fitted_tensors(plan.load, packed), report=lambda remarks: report
        ),
        destination,
        max_shard_bytes=max_shard_bytes,
        progress=progress,
        compare_source=False,
        keep=False,
    )
    return Distilled(written, fit)


def _refuse_memory(plan: DistillationPlan) -> None:
    """Raises `MemoryLimitError` where the device has less than the fit takes."""
    needed, available = plan.device_memory, available_memory()
    if needed > available:
        raise MemoryLimitError(
            f"distilling {plan.source} takes about {needed / 1e9:.1f} GB of device memory (both "
            f"models, {model_fit.BYTES_A_CODE} bytes a weight in codes, and a step of "
            f"{plan.windows_of_step} windows), but {available / 1e9:.1f} GB are available on "
            f"{jax.devices()[0].device_kind}; use a larger device, fewer --batch-windows, or "
            "qwen-jax quantize --fit-steps, which has one layer in memory at a time"
        )


def _packed(plan: DistillationPlan, model: CausalLM, fit: Fit) -> dict[str, dict[str, np.ndarray]]:
    """The parts of all tensors with new codes, by tree path and name."""
    coded, schemes = tensors_in_codes(model), plan.load.scheme.tensors
    return {
        path: packed_parts(path, codes, coded[path].input_scale, schemes[path])
        for path, codes in (fit.codes if fit.better else {}).items()
    }


def _report(
    plan: DistillationPlan, model: CausalLM, teacher: CausalLM, fit: Fit, seconds: float
) -> dict[str, Any]:
    """Content of the folder's report."""
    rows = {}
    for path, tensor in (tensors_in_codes(model) if fit.better else {}).items():
        start = Start(fit.codes[path], tensor.input_scale)
        missed, clipped = judged(at(teacher, path)[...], start, format_of(tensor))
        rows[path] = float(missed), float(clipped)
    held_out = divided(plan.calibration.tokens, plan.steps, plan.windows_of_step)[1]
    done = {
        "teacher": show(plan.teacher.name),
        "steps": plan.steps,
        "batch_windows": plan.windows_of_step,
        "code_rate": model_fit.CODE_RATE,
        "scale_rate": model_fit.SCALE_RATE,
        "calibration": text_of(plan.calibration),
        "held_out_windows": len(held_out),
        **outcome(fit),
        "seconds": round(seconds, 1),
    }
    origin = hashlib.sha256(json.dumps(plan.identity, sort_keys=True).encode()).hexdigest()
    return {**distilled_report(plan.report_before, done, rows), "made_from": origin}


def outcome(fit: Fit) -> dict[str, Any]:
    """What a fit came to, as JSON."""
    return {
        "held_out_kl_before": fit.before,
        "held_out_kl_after": fit.after,
        "new_codes": fit.better,
    }


def _outcome(fit: Fit) -> str:
    """The same for a reader."""
    figures = f"mean KL over windows held out: {fit.before:.4f} before, {fit.after:.4f} after"
    return figures if fit.better else f"{figures}; no better, so all codes stay as they are"
