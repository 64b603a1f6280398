"""What a distillation will do, known before it starts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from qwen_jax.checkpoint.formats import declares_codes
from qwen_jax.checkpoint.json_file import read_object
from qwen_jax.checkpoint.native import RECORD, Record, read_record
from qwen_jax.checkpoint.plan import LoadPlan, plan_load
from qwen_jax.checkpoint.safetensors_io import open_folder
from qwen_jax.config import QwenConfig
from qwen_jax.errors import CheckpointError

from .inputs import Inputs
from .model_fit import STEPS, WINDOWS_OF_STEP, active_weights, device_memory, divided
from .plan import Plan, gather_inputs, identity
from .quantization.calibration import Calibration
from .quantization.fitted import fitted_tensors
from .quantization.report import read_report
from .side_files import CONFIG, REPORT, side_files
from .teacher import plan_teacher

_BASE_MEMORY = 700e6
# Rough, for the estimate of time alone; of a product of two numbers and its sum two operations.
OPERATIONS_A_SECOND = {"cpu": 5e9, "other": 2e12}
# A forward pass of the teacher, and of the student one with its way back.
_OPERATIONS_A_WEIGHT = 8


@dataclass(frozen=True, kw_only=True)
class DistillationPlan(Plan):
    """A folder in codes to be written.

    Attributes:
        teacher: folder of the float model.
        calibration: the text.
        steps: of the fit.
        windows_of_step: windows of text in one step.
        report_before: content of the source's report.
    """

    teacher: Path
    calibration: Calibration
    steps: int
    windows_of_step: int
    report_before: Mapping[str, Any]

    @property
    def device_memory(self) -> int:
        """Estimate of the bytes of device memory that the fit takes."""
        window = self.calibration.tokens.shape[1]
        return device_memory(self.load.config, self.load.scheme, self.windows_of_step, window)

    @property
    def peak_memory(self) -> int:
        """Estimate of the bytes of host memory; on a CPU the device's too."""
        fit = self.device_memory if jax.default_backend() == "cpu" else 0
        return int(_BASE_MEMORY) + 2 * self.load.nbytes + fit

    @property
    def seconds(self) -> float:
        """Estimate of the time of the fit on this machine's default device."""
        rate = OPERATIONS_A_SECOND["cpu" if jax.default_backend() == "cpu" else "other"]
        tokens = self.steps * self.windows_of_step * self.calibration.tokens.shape[1]
        active = active_weights(self.load.config)
        return _OPERATIONS_A_WEIGHT * active * tokens / rate

    def as_json(self) -> dict[str, Any]:
        """The plan as a JSON object, tensors counted only."""
        return super().as_json() | {
            "recipe": self.load.scheme.recipe,
            "teacher": str(self.teacher),
            "steps": self.steps,
            "batch_windows": self.windows_of_step,
            "calibration": text_of(self.calibration),
            "device_memory_bytes": self.device_memory,
        }


def plan_distillation(
    source: Path,
    teacher: Path,
    calibration: Calibration,
    *,
    steps: int = STEPS,
    windows_of_step: int = WINDOWS_OF_STEP,
) -> DistillationPlan:
    """Plans to fit the codes of a folder to the predictions of the model they were made from.

    Args:
        source: a folder that `quantize` wrote.
        teacher: a folder with that model in floating point.
        calibration: the text.
        steps: of the fit.
        windows_of_step: windows of text in one step.

    Returns:
        The plan. Headers and small files have been read.

    Raises:
        CheckpointError: a folder is damaged or not understood, the source is not in codes or lacks
            what `quantize` writes beside them, or the teacher is in codes or another model.
        ConfigError: a configuration is malformed or not implemented.
        RequestError: a number below 1, or too little text.
    """
    divided(calibration.tokens, steps, windows_of_step)
    planned, before = _plan_source(source)
    report = read_report(source, planned.scheme)
    beside = plan_teacher(teacher, planned)
    taken, left = side_files(source)
    inputs = gather_inputs(planned.folder, [*taken, REPORT])
    texts = {f"calibration file {i}": file for i, file in enumerate(calibration.files, 1)}
    shards = {f"teacher's {name}": teacher / name for name in beside.folder.shards}
    config = {f"teacher's {CONFIG}": teacher / CONFIG}
    inputs = Inputs({**inputs.small, **texts, **config}, {**inputs.large, **shards})
    options = {
        "distilled": [steps, windows_of_step],
        "calibration": text_of(calibration),
        "made_on": [jax.__version__, jax.devices()[0].device_kind],
    }
    return DistillationPlan(
        source=source,
        load=planned,
        tensors=fitted_tensors(planned, {}),
        native=True,
        record=dataclasses.replace(before, checksums={}),
        before=before,
        edited=set(planned.scheme.tensors),
        config=read_object(source / CONFIG),
        side_files=taken,
        files_left=left,
        edit_files=None,
        largest_gather=0,
        remarks=[],
        inputs=inputs,
        identity=identity(planned.folder, inputs, options),
        teacher=teacher,
        calibration=calibration,
        steps=steps,
        windows_of_step=windows_of_step,
        report_before=report,
    )


def _plan_source(folder: Path) -> tuple[LoadPlan, Record]:
    """Where the tensors of a folder in codes are, with those of the MTP head, and its record."""
    if not declares_codes(folder):
        raise CheckpointError(
            f"{folder} is not in codes; make a folder that is with qwen-jax quantize"
        )
    record = read_record(folder)
    if record is None:
        raise CheckpointError(
            f"{folder} has no {RECORD}, which holds the checksums of its tensors; fetch it with "
            "the rest of the folder"
        )
    return plan_load(open_folder(folder), QwenConfig.from_hf(folder), mtp=True), record


def text_of(calibration: Calibration) -> dict[str, Any]:
    """What identifies the text."""
    found = calibration.to_json()
    del found["fit_steps"]
    return found
