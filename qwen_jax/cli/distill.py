"""`qwen-jax distill`: codes of a folder fitted to what the float model predicts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from ..errors import RequestError
from .console import Notes, accept_any_text, duration, size, table
from .conversion import Job, find_source, plan_rows
from .flags import about
from .options import MaybeWhole, Switch, Text

if TYPE_CHECKING:
    from convert.distillation_plan import DistillationPlan
    from convert.writing import Written


def distill(
    coded: str,
    destination: str | None = None,
    *,
    teacher: str,
    calibration: Annotated[tuple[str, ...], Parameter(allow_leading_hyphen=True)],
    steps: MaybeWhole = None,
    batch_windows: MaybeWhole = None,
    window: MaybeWhole = None,
    chat_template: Text = None,
    dry_run: Switch = False,
    revision: Text = None,
    max_shard_size: Text = None,
    json: Switch = False,
    quiet: Annotated[bool, Parameter(negative="", alias="-q")] = False,
) -> None:
    """Fit all codes and scales of a model together, so that it predicts what the float model does.

    Goes on from a folder that quantize wrote, and writes a new one of the same size. Both models
    lie in device memory, and 24 bytes a weight in codes; where that is too much, quantize
    --fit-steps fits a layer at a time. The old codes stay where the new ones are no better on text
    that was held out. A run that is interrupted leaves nothing, and is begun again.

    Args:
        coded: a folder in codes.
        destination: the folder to write; it must not exist.
        teacher: the float model that the codes were made from: a model folder, an id on the Hugging
            Face hub, or demo.
        calibration: text (.txt, .jsonl) or token ids (.npy) to fit the codes to; may be repeated.
        steps: of the descent (600 by default).
        batch_windows: windows of text in one step (16 by default); memory grows with it.
        window: tokens of a window (512 by default).
        chat_template: a Jinja file for chats in the calibration text; the model's own by default.
        dry_run: say what would be done, and do nothing.
        revision: branch, tag or commit of a teacher on the hub.
        max_shard_size: most bytes in one file (4GB by default).
        json: write one JSON object to standard output.
        quiet: write nothing to standard error but errors and warnings.
    """
    accept_any_text()
    notes = Notes(quiet=quiet)
    if destination is None and not dry_run:
        raise RequestError(
            "no destination: qwen-jax distill CODED DESTINATION --teacher FLOAT --calibration "
            "FILE; without one, --dry-run says what would be done"
        )
    files = [Path(name) for name in calibration]
    template = None if chat_template is None else Path(chat_template)
    for file in (*files, *filter(None, [template])):
        if not file.is_file():
            raise RequestError(f"{file} is no file; give calibration text, or a template")
    job = Job.prepare(coded, destination, max_shard_size, resume=False, verify=False)
    source = find_source(coded, None, notes, dry_run=dry_run)
    floats = find_source(teacher, revision, notes, dry_run=dry_run)
    from convert.distill import distill as write
    from convert.distill import outcome
    from convert.distillation_plan import plan_distillation
    from convert.model_fit import STEPS, WINDOWS_OF_STEP, windows_wanted
    from convert.quantization.calibration import WINDOW, prepare_calibration

    from ..config import QwenConfig

    steps = STEPS if steps is None else steps
    size_of_step = WINDOWS_OF_STEP if batch_windows is None else batch_windows
    with about("--steps, --batch-windows"):
        wanted = windows_wanted(steps, size_of_step)
    text = prepare_calibration(
        files,
        source,
        QwenConfig.from_hf(source),
        windows=wanted,
        window=WINDOW if window is None else window,
        chat_template=template,
    )
    plan = plan_distillation(source, floats, text, steps=steps, windows_of_step=size_of_step)
    came_to: dict[str, Any] = {}

    def fit_and_write(plan: DistillationPlan, folder: Path, **arguments: Any) -> Written:
        # Writing is nothing beside the fit, which tells of itself.
        done = write(plan, folder, max_shard_bytes=arguments["max_shard_bytes"], tell=notes)
        came_to.update(outcome(done.fit))
        return done.written

    job.run(
        plan,
        notes,
        dry_run=dry_run,
        json=json,
        text=table(plan_rows(plan) | _rows(plan)),
        write=fit_and_write,
        outcome=came_to,
    )


def _rows(plan: DistillationPlan) -> dict[str, str]:
    """The fit for a reader."""
    windows, window = plan.calibration.tokens.shape
    return {
        "teacher": str(plan.teacher),
        "fit": f"{plan.steps:,} steps of {plan.windows_of_step} windows of {window} tokens, out of "
        f"{windows:,}",
        "memory": f"about {size(plan.peak_memory)} on the host, mapped files not counted; about "
        f"{size(plan.device_memory)} on the device",
        "time": f"about {duration(plan.seconds)} on this device, roughly",
    }
