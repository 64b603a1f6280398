"""What a quantisation will do, known before it starts."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from qwen_jax.checkpoint.assemble import stored_dtype
from qwen_jax.checkpoint.formats import declares_codes, read_scheme
from qwen_jax.checkpoint.json_file import read_object
from qwen_jax.checkpoint.native import Record, read_record
from qwen_jax.checkpoint.plan import LoadPlan
from qwen_jax.checkpoint.problems import listed, show
from qwen_jax.errors import CheckpointError
from qwen_jax.quant import RECIPES, Method, Recipe

from .inputs import Inputs
from .outputs import largest_gather
from .plan import Plan, describe, gather_inputs, identity
from .quantization.calibration import Calibration
from .quantization.choice import Choice, choose
from .quantization.estimate import Estimate
from .quantization.hidden_states import KEPT
from .quantization.tensors import NATIVE, output_tensors
from .side_files import REPORT, side_files, written_config
from .source import open_source


@dataclass(frozen=True, kw_only=True)
class QuantizationPlan(Plan):
    """A folder in codes to be written.

    Attributes:
        choice: what becomes codes.
        calibration: the text; None to round everything without data.
    """

    choice: Choice
    calibration: Calibration | None

    @property
    def origin(self) -> str:
        """SHA-256 of what a run depends on: source, rules, text, device and versions."""
        return hashlib.sha256(json.dumps(self.identity, sort_keys=True).encode()).hexdigest()

    def made(self, folder: Path) -> bool:
        """See `Plan`; the report says from what codes were made."""
        file = folder / REPORT
        return file.is_file() and read_object(file).get("made_from") == self.origin

    @property
    def estimate(self) -> Estimate:
        """Sizes, and what the run takes."""
        shape = None if self.calibration is None else self.calibration.tokens.shape
        return Estimate(self.load.config, self.choice, self.tensors, shape)

    @property
    def peak_memory(self) -> int:
        """Estimate of the bytes of host memory that the run takes, mapped files not counted."""
        return self.estimate.peak_memory + self.largest_gather

    @property
    def seconds(self) -> float:
        """Estimate of the time."""
        return self.estimate.seconds

    def as_json(self) -> dict[str, Any]:
        """The plan as a JSON object, tensors counted only."""
        calibration = None if self.calibration is None else self.calibration.to_json()
        return super().as_json() | self.estimate.as_json() | {"calibration": calibration}


def plan_quantization(
    source: Path,
    recipe: Recipe,
    *,
    method: Method | None = None,
    calibration: Calibration | None = None,
) -> QuantizationPlan:
    """Plans to put a model folder into codes.

    The vision tower stays behind; the multi-token prediction head goes along.

    Args:
        source: a folder in any layout that is read. Weights that are quantised in another
            program's format are dequantised first.
        recipe: what becomes codes.
        method: in place of the method of every rule.
        calibration: text that codes are fitted to.

    Returns:
        The plan. Headers and small files have been read, and calibration text.

    Raises:
        CheckpointError: the folder is damaged, not understood, or quantised by this program.
        ConfigError: the configuration is malformed or not implemented.
        RequestError: the recipe does not fit the model, or the method needs calibration text.
    """
    if declares_codes(source):
        name = read_scheme(source, ()).recipe
        raise CheckpointError(
            f"{source} is quantised already, by qwen-jax quantize (recipe {show(name)}); codes of "
            "codes lose more than they save: give the folder that it was made from"
        )
    opened = open_source(source)
    folder, load = opened.folder, opened.load
    choice = choose(_tree(load), recipe, method=method, calibrated=calibration is not None)
    taken, left = side_files(source)
    before = read_record(source) or Record(layout=load.layout)
    record = describe(before, load, folder, vision=False)
    inputs = gather_inputs(folder, taken)
    if calibration is not None:
        texts = {f"calibration file {i}": file for i, file in enumerate(calibration.files, 1)}
        inputs = Inputs({**inputs.small, **texts}, inputs.large)
    options = {
        "rules": [dataclasses.asdict(rule) for rule in choice.recipe.rules],
        "calibration": None if calibration is None else calibration.to_json(),
        # Sums are rounded otherwise elsewhere.
        "made_on": [jax.__version__, jax.devices()[0].device_kind],
    }
    config = written_config(
        opened.raw_config,
        load.config,
        vision=False,
        changes={},
        dequantised=bool(folder.format_counts),
    )
    return QuantizationPlan(
        source=source,
        load=load,
        tensors=output_tensors(
            load.config,
            load.mtp_layers,
            choice.tree,
            choice.scheme,
            kept=_not_yet,
            maker=_not_yet,
        ),
        native=True,
        record=dataclasses.replace(record, recipe=recipe.name),
        before=before,
        edited=set(choice.scheme.tensors),
        config={**config, "quantization_config": choice.scheme.to_config()},
        side_files=taken,
        files_left=left,
        edit_files=None,
        scratch_bytes=_scratch_bytes(load, calibration),
        largest_gather=largest_gather(load, NATIVE),
        remarks=_remarks(choice, folder.format_counts, calibrated=calibration is not None),
        inputs=inputs,
        identity=identity(folder, inputs, options),
        choice=choice,
        calibration=calibration,
    )


def _not_yet(name: str) -> Any:
    raise RuntimeError(f"internal error: {name} is asked for before its plan is carried out")


def _scratch_bytes(load: LoadPlan, calibration: Calibration | None) -> int:
    """Bytes of the hidden states that are kept beside the folder while it is written."""
    if calibration is None:
        return 0
    return 4 * calibration.tokens.size * load.config.hidden_size * (KEPT + 1)


def _tree(load: LoadPlan) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and stored dtype of each tensor by tree path."""
    return {
        source.path: jax.ShapeDtypeStruct(source.shape, stored_dtype(load.folder, source))
        for source in load.sources
    }


def _remarks(choice: Choice, formats: Mapping[str, int], *, calibrated: bool) -> list[str]:
    """What a person should know about a plan."""
    notes = []
    if formats:
        counts = ", ".join(f"{count} x {name}" for name, count in formats.items())
        notes.append(f"already quantised matrices are dequantised first ({counts})")
    if choice.recipe.name not in RECIPES and choice.idle:
        notes.append(f"patterns that match no tensor of this model: {listed(choice.idle)}")
    if not calibrated:
        notes.append("no calibration text: all is rounded without data")
    return notes
