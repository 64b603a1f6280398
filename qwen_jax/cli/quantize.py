"""`qwen-jax quantize`: any model folder to a native one in codes of 3, 4 or 8 bits."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from ..configuration.presets import PRESET_NAMES
from ..errors import RequestError
from .console import Notes, accept_any_text, duration, size, table, write_json
from .conversion import Job, find_source, plan_rows
from .options import MaybeWhole, Switch, Text
from .shape import Shape, find_shape

if TYPE_CHECKING:
    from convert.quantization.estimate import Estimate

    from ..quant import Method, Recipe

_RECIPE_OF_BITS = {"3": "q3", "4": "q4", "8": "q8"}


def quantize(
    source: str,
    destination: str | None = None,
    *,
    bits: Literal["3", "4", "8"] | None = None,
    recipe: Text = None,
    method: Literal["round-to-nearest", "activation-aware", "gptq"] | None = None,
    calibration: Annotated[tuple[str, ...], Parameter(allow_leading_hyphen=True)] = (),
    calibration_windows: MaybeWhole = None,
    window: MaybeWhole = None,
    chat_template: Text = None,
    fit_steps: MaybeWhole = None,
    dry_run: Switch = False,
    resume: Switch = False,
    revision: Text = None,
    max_shard_size: Text = None,
    json: Switch = False,
    quiet: Annotated[bool, Parameter(negative="", alias="-q")] = False,
) -> None:
    """Write a model in codes of 3, 4 or 8 bits, within one layer of memory.

    Without --calibration all is rounded to the nearest level. The multi-token prediction head goes
    along, a vision tower stays behind. --dry-run also takes the name of a released shape, such as
    qwen3.6-35b-a3b, or a folder without weights.

    Args:
        source: a model folder, an id on the Hugging Face hub such as Qwen/Qwen3.5-0.8B, or demo.
        destination: the folder to write; it must not exist.
        bits: 3 (the default), 4 or 8: recipe q3, q4 or q8.
        recipe: q3, q3-small, q4, q8, experts-only, or a JSON file of rules.
        method: in place of the method of every rule; all but round-to-nearest need --calibration.
        calibration: text (.txt, .jsonl) or token ids (.npy) to fit the codes to; may be repeated.
        calibration_windows: most windows of calibration text (128 by default).
        window: tokens of a window (512 by default).
        chat_template: a Jinja file for chats in the calibration text; the model's own by default.
        fit_steps: steps in which each layer's codes are fitted to its output (none by default).
        dry_run: say what would be done, and do nothing.
        resume: go on with a run that was interrupted, at the first layer that is not finished.
        revision: branch, tag or commit on the hub.
        max_shard_size: most bytes in one file (4GB by default).
        json: write one JSON object to standard output.
        quiet: write nothing to standard error but errors and warnings.
    """
    accept_any_text()
    notes = Notes(quiet=quiet)
    if bits is not None and recipe is not None:
        raise RequestError(
            f"--bits {bits} and --recipe {recipe}: --bits {bits} is short for --recipe "
            f"{_RECIPE_OF_BITS[bits]}; give one of them"
        )
    if destination is None and not dry_run:
        raise RequestError(
            "no destination: qwen-jax quantize SOURCE DESTINATION; without one, --dry-run says "
            "what would be done; see qwen-jax quantize --help"
        )
    if not dry_run and source.lower() in PRESET_NAMES and not Path(source).exists():
        raise RequestError(
            f"{source} names a shape, which has no weights; give a model folder, or --dry-run"
        )
    settings = _calibration_settings(
        calibration, calibration_windows, window, chat_template, fit_steps
    )
    job = Job.prepare(source, destination, max_shard_size, resume=resume, verify=False)
    from convert.quantization.recipe_file import read_recipe

    chosen = read_recipe(recipe or _RECIPE_OF_BITS[bits or "3"])
    if dry_run:
        shape = find_shape(source, revision, weights=False)
        if shape.folder is None or not _has_weights(shape.folder):
            _show_estimate(shape, job, chosen, method, settings, json=json)
            return
        folder = shape.folder
    else:
        folder = find_source(source, revision, notes)
    from convert.quantization.calibration import prepare_calibration
    from convert.quantization_plan import plan_quantization
    from convert.quantize import quantize as write

    from ..config import QwenConfig

    text = None
    if settings is not None:
        files = [Path(name) for name in calibration]
        text = prepare_calibration(files, folder, QwenConfig.from_hf(folder), **settings)
    plan = plan_quantization(folder, chosen, method=method, calibration=text)
    job.run(
        plan,
        notes,
        dry_run=dry_run,
        json=json,
        text=table(plan_rows(plan) | _rows(plan.estimate, job)),
        facts={"file_bytes": plan.estimate.file_bytes(job.max_shard_bytes)},
        write=functools.partial(write, tell=notes),
    )


def _calibration_settings(
    files: tuple[str, ...],
    windows: int | None,
    window: int | None,
    chat_template: str | None,
    fit_steps: int | None,
) -> dict[str, Any] | None:
    """Arguments of `prepare_calibration`; None without calibration text."""
    template = None if chat_template is None else Path(chat_template)
    settings = {
        "windows": windows,
        "window": window,
        "chat_template": template,
        "fit_steps": fit_steps,
    }
    given = {name: value for name, value in settings.items() if value is not None}
    if files:
        for name in (*files, *filter(None, [chat_template])):
            if not Path(name).is_file():
                raise RequestError(f"{name} is no file; give calibration text, or a template")
        return given
    if given:
        flags = {"windows": "--calibration-windows"}
        names = ", ".join(flags.get(name, f"--{name.replace('_', '-')}") for name in given)
        raise RequestError(f"{names}: without --calibration this has no effect; add a text")
    return None


def _has_weights(folder: Path) -> bool:
    from ..checkpoint.index import INDEX

    return any(folder.glob("*.safetensors")) or (folder / INDEX).exists()


def _show_estimate(
    shape: Shape,
    job: Job,
    recipe: Recipe,
    method: Method | None,
    settings: dict[str, Any] | None,
    *,
    json: bool,
) -> None:
    """What a model of which there is the configuration alone would take."""
    from convert.quantization.calibration import WINDOW, WINDOWS, refuse_windows
    from convert.quantization.estimate import estimate_shape

    calibration = None
    if settings is not None:
        calibration = (settings.get("windows", WINDOWS), settings.get("window", WINDOW))
        refuse_windows(*calibration, shape.config.max_position_embeddings)
    found = estimate_shape(shape.config, recipe, method=method, calibration=calibration)
    if json:
        file_bytes = found.file_bytes(job.max_shard_bytes)
        write_json({"source": shape.name, **found.as_json(), "file_bytes": file_bytes})
        return
    source = f"{shape.name}: {shape.config.model_type}, counted from its configuration"
    print(table({"source": source} | _rows(found, job)))


def _rows(found: Estimate, job: Job) -> dict[str, str]:
    """Sizes for a reader."""
    from ..quant import by_part

    file_bytes, choice = found.file_bytes(job.max_shard_bytes), found.choice
    parts = {
        f"  {part}": f"{size(total.after)}, {total.bits_per_value:.3f} bits a weight "
        f"({total.values:,})"
        for part, total in by_part(found.sizes).items()
    }
    return {
        "recipe": f"{choice.recipe.name}: {len(choice.scheme.tensors)} tensors in codes",
        "files": f"{file_bytes:,} bytes, {found.tensor_bytes:,} of them tensors "
        f"({found.mtp_bytes:,} of the MTP head)",
        "bits": f"{found.bits_per_text_weight:.3f} a weight of the text model",
        **parts,
        "kept": ", ".join(f"{count} x {path}" for path, count in found.kept.items()),
        "memory": f"about {size(found.peak_memory)} on the host, mapped files not counted",
        "time": f"about {duration(found.seconds)} on this device, roughly",
    }
