"""`qwen-jax train`: a model with new weights, or one that goes on, trained on text."""

from __future__ import annotations

import contextlib
import importlib.util
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from ..errors import RequestError
from .console import Notes, accept_any_text, duration, size, table, write_json
from .conversion import DEFAULT_SHARD_SIZE
from .flags import about
from .options import DType, Switch, Text, Whole
from .shape import parse_size
from .train_source import Source, read_texts
from .training import (
    DescentFlags,
    RouterFlags,
    ScopeFlags,
    described,
    mesh_of,
    step_bar,
    training_of,
)

if TYPE_CHECKING:
    from ..train import Data, Split, TrainState
    from ..train.lora import Lora
    from ..train.run import Run

_DESCENT, _ROUTERS, _SCOPE = DescentFlags(), RouterFlags(), ScopeFlags()
# Of each parameter that is trained: itself in float32, two moments and a gradient.
_BYTES_A_TRAINED = 16


def train(
    model: str,
    destination: str | None = None,
    *,
    text: Annotated[tuple[str, ...], Parameter(allow_leading_hyphen=True)],
    weights: Literal["own", "new"] = "own",
    tokenizer: Text = None,
    held_out: Text = None,
    look_every: Whole = 0,
    descent: DescentFlags = _DESCENT,
    routers: RouterFlags = _ROUTERS,
    scope: ScopeFlags = _SCOPE,
    dtype: DType | None = None,
    recompute: bool = True,
    data_devices: Whole = 1,
    expert_devices: Whole = 1,
    checkpoints: Text = None,
    save_every: Whole = 0,
    resume: Switch = False,
    metrics: Text = None,
    max_shard_size: Text = None,
    dry_run: Switch = False,
    json: Switch = False,
    quiet: Annotated[bool, Parameter(negative="", alias="-q")] = False,
) -> None:
    """Train a model on text, and write it in the Hugging Face layout.

    Goes on from the weights of a folder, all of them or some, or begins with new ones. Needs the
    train extra: pip install 'qwen-jax[train]'.

    Args:
        model: a model folder or demo; with --weights new also a preset or a config.json.
        destination: the folder to write; it must not exist.
        text: text (.txt, .xz, .jsonl) or token ids (.npy); may be repeated.
        weights: the model's own, or new random ones.
        tokenizer: folder of the tokenizer; the model's by default.
        held_out: text to look at, not to train on.
        look_every: steps between two looks; 0 looks at the end alone.
        descent: how the model follows its gradients.
        routers: what is asked of routers beside the text.
        scope: which parameters change.
        dtype: of the computation; the model's own by default. What is trained is kept in float32.
        recompute: compute each layer again in the backward pass, for less memory.
        data_devices: devices that the windows of a batch lie over.
        expert_devices: devices that the experts of a layer lie over.
        checkpoints: folder to save the state of the run in.
        save_every: steps between two saves; 0 saves at the end alone.
        resume: go on from the newest checkpoint there, with the same flags.
        metrics: file for the figures of each step, as lines of JSON.
        max_shard_size: most bytes in one file (4GB by default).
        dry_run: say what would be done, and do nothing.
        json: write one JSON object to standard output.
        quiet: write nothing to standard error but errors and warnings.
    """
    accept_any_text()
    notes = Notes(quiet=quiet)
    limit = parse_size(max_shard_size or DEFAULT_SHARD_SIZE, "--max-shard-size")
    _refuse_places(destination, checkpoints, save_every, resume=resume, dry_run=dry_run)
    _refuse_looks(look_every, save_every, held_out)
    source = Source.open(model, weights, tokenizer, dtype)
    training = training_of(descent, routers, source.config, recompute=recompute)
    schedule, lora = descent.schedule(), scope.lora()
    data, watched = read_texts(source, text, held_out, descent)
    batches = {"--batch-size": data.rows}
    if watched:
        batches["--held-out"] = watched[0].inputs.shape[0]
    mesh = mesh_of(data_devices, expert_devices, source.config, batches)
    if dry_run or destination is None:
        rows = _plan(source, data, descent, scope, lora)
        write_json(rows) if json else print(table({k: str(v) for k, v in rows.items()}))
        return
    from ..train.run import Run

    trainer, parts = source.trainer(training, scope, lora, mesh)
    run = Run(
        trainer=trainer,
        data=data,
        schedule=schedule,
        fixed=parts.fixed,
        held_out=watched,
        look_every=look_every,
        save_every=save_every,
    )
    begin = time.monotonic()
    state, figures = _go(run, parts, checkpoints, metrics, notes, resume=resume)
    nbytes = source.write(_changed(state, parts, lora), parts.fixed, Path(destination), limit)
    report = {"destination": destination, "bytes": nbytes, "steps": schedule.steps, **figures}
    report["seconds"] = time.monotonic() - begin
    if json:
        write_json(report)
        return
    print(
        f"{destination}: {size(nbytes)} after {schedule.steps} steps in "
        f"{duration(report['seconds'])}; {described(figures)}"
    )


def _refuse_looks(look_every: int, save_every: int, held_out: str | None) -> None:
    """Raise for a number of steps below 0, or nothing to look at."""
    for name, value in {"--look-every": look_every, "--save-every": save_every}.items():
        if value < 0:
            raise RequestError(f"{name} is {value}; accepted is a whole number from 0 on")
    if look_every and held_out is None:
        raise RequestError("--look-every needs --held-out FILE, the text to look at")


def _refuse_places(
    destination: str | None,
    checkpoints: str | None,
    save_every: int,
    *,
    resume: bool,
    dry_run: bool,
) -> None:
    """Raise what can be known of places before anything is read."""
    if destination is None and not dry_run:
        raise RequestError(
            "no destination: qwen-jax train MODEL DESTINATION --text FILE; without one, --dry-run "
            "says what would be done"
        )
    given = ["--resume"] * resume + ["--save-every"] * bool(save_every)
    if given and checkpoints is None:
        raise RequestError(f"{', '.join(given)} needs --checkpoints FOLDER")
    needed = ["optax"] + ["orbax"] * (checkpoints is not None)
    if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
        raise RequestError(f"{', '.join(missing)} is not installed: install qwen-jax[train]")
    if destination is not None:
        from convert.writing import check_destination

        check_destination(Path(destination), resume=False, nbytes=0)


def _plan(
    source: Source, data: Data, descent: DescentFlags, scope: ScopeFlags, lora: Lora | None
) -> dict[str, Any]:
    """What would be done."""
    import jax

    from ..model import parameter_shapes
    from ..quant.abstract import nbytes
    from ..train import split
    from ..train.parameters import count

    shapes = source.shapes()
    held = sum(map(nbytes, shapes.values()))
    if lora is None:
        with about("--only"):
            trained = count(split(shapes, scope.only or ("*",)).trained)
    else:
        with about("--lora-rank, --lora-targets"):
            trained = count(jax.eval_shape(lora.start, shapes, jax.random.key(0)))
    numbers = count(parameter_shapes(source.config))
    return {
        "model": f"{source.config.model_type}, {numbers:,} parameters",
        "weights": "new" if source.folder is None else str(source.folder),
        "trained": f"{trained:,} parameters",
        "text": f"{len(data.tokens):,} tokens, {data.windows:,} windows of {data.window}",
        "run": f"{descent.steps:,} steps of {data.rows} windows: "
        f"{descent.steps / data.steps_per_epoch:.2f} epochs",
        "memory": f"about {size(held + _BYTES_A_TRAINED * trained)} beside activations",
    }


def _go(
    run: Run,
    parts: Split,
    checkpoints: str | None,
    metrics: str | None,
    notes: Notes,
    *,
    resume: bool,
) -> tuple[TrainState, dict[str, float]]:
    """The state after the last step, and its figures."""
    from ..train.checkpoint import Checkpoints
    from ..train.metrics import MetricsFile

    state = run.trainer.start(parts.trained)
    with contextlib.ExitStack() as stack:
        saved = None
        if checkpoints is not None:
            saved = Checkpoints(Path(checkpoints), run.identity(state))
            stack.enter_context(saved)
            if resume:
                state = saved.restore(state)
                notes(f"going on after step {int(state.step)}")
            elif saved.latest is not None:
                raise RequestError(
                    f"{checkpoints} holds checkpoints of a run; --resume goes on with it, another "
                    "folder begins anew"
                )
        file = None
        if metrics is not None:
            file = MetricsFile(Path(metrics), int(state.step))
            stack.callback(file.close)
        newest: dict[str, float] = {}
        bar = stack.enter_context(step_bar(notes, run.schedule.steps, int(state.step)))

        def tell(step: int, figures: Any) -> None:
            last = {name: float(values[-1]) for name, values in figures.items()}
            newest.update(last)
            bar(step, last)

        with _advised():
            return run.go(state, checkpoints=saved, metrics=file, tell=tell), newest


@contextlib.contextmanager
def _advised() -> Iterator[None]:
    """A loss or gradient that is no number is told with the flags that may help."""
    try:
        yield
    except FloatingPointError as error:
        what = str(error).partition(";")[0]
        raise FloatingPointError(
            f"{what}; lower --learning-rate or --clip, raise --warmup, or compute with "
            "--dtype float32"
        ) from None


def _changed(state: TrainState, parts: Split, lora: Lora | None) -> dict[str, Any]:
    """The parameters that have other values than before."""
    if lora is None:
        return state.trained
    merged = lora.merged(state.trained, parts.fixed)
    return {name: value for name, value in merged.items() if value is not parts.fixed[name]}
