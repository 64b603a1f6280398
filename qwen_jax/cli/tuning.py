"""Finding how kernels are cut best on this GPU: the work of `qwen-jax tune`.

Configurations are tried in the model itself, cut to a few layers: a kernel alone in a loop keeps
its instructions at hand, and short code looks no better than long code. It needs none of the
libraries that the command line brings.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from pallas_kernels import tuning
from pallas_kernels._compat import current_target
from pallas_kernels.tuning import Decision, Place

from ..accounting import FLOATS, weight_bytes
from ..config import QwenConfig
from ..errors import RequestError
from ..memory import refuse_unless_fits
from ..model import initialise, parameter_shapes
from ..quant import named_recipe, scheme_of
from .flags import about
from .measure import Note, first_layers
from .shape import find_shape
from .tune_request import TuneRequest
from .tuned_work import Timing, Work

LEAST_LAYERS = 4
AT_ONCE = 8
# A gain below is not told from noise.
LEAST_GAIN = 0.005
# Those with the most time first: where the budget ends, the rest keeps its heuristics.
FIRST = ("dequant_matmul", "expert_dispatch", "block_attention", "delta_rule", "router")

Configs = Mapping[Place, Any]
TimeAll = Callable[[Sequence[Configs]], Sequence[Timing | None]]


@dataclasses.dataclass(frozen=True)
class Found:
    """A configuration that is faster than the heuristic's.

    Attributes:
        config: the configuration.
        timing: of the work with it alone.
    """

    config: Any
    timing: Timing

    @property
    def entry(self) -> dict[str, Any]:
        """As in a tuning file."""
        seconds = {"seconds": self.timing.seconds, "heuristic_seconds": self.timing.heuristic}
        return {"config": tuning.as_fields(self.config), **seconds}


def tune(request: TuneRequest, note: Note) -> dict[str, Any]:
    """Try the kernels' configurations, and write the better ones to a file.

    Args:
        request: what to measure.
        note: told what is going on.

    Returns:
        The file, how many configurations were timed of how many, and by work the times of the
        heuristics and the entries, ready for JSON.

    Raises:
        RequestError: no GPU that kernels run on, an unknown recipe, too many layers, or an output
            that is another file.
        MemoryLimitError: the layers do not fit.
    """
    until = time.monotonic() + request.budget_seconds
    # What is asked for comes first: it is wrong on any machine.
    recipe = None if request.recipe is None else named_recipe(request.recipe)
    config = cut_model(find_shape(request.model, weights=False).config, request.num_layers)
    scheme = FLOATS if recipe is None else scheme_of(parameter_shapes(config), recipe)
    if jax.default_backend() != "gpu":
        raise RequestError(
            f"kernels are tuned on a GPU, and JAX sees {jax.default_backend()}; their heuristics "
            "serve until then"
        )
    known_entries(_place(request.output), current_target().kind)
    refuse_unless_fits(weight_bytes(config, scheme), f"{config.num_hidden_layers} layers")
    note(f"making {config.num_hidden_layers} layers with random weights")
    model = jax.block_until_ready(initialise(config, jax.random.key(0), recipe))
    works = [Work.decode(model, rows, request.context) for rows in request.batch_sizes]
    works += [Work.prefill(model, tokens) for tokens in request.prompt_tokens]
    entries: tuning.Table = {}
    seen: set[Place] = set()
    report: dict[str, Any] = {}
    for work in works:
        if time.monotonic() > until:
            note(f"{work.name}: not tuned, the time is over")
            continue
        found, tried, count = _tuned(work, until, seen, note)
        measured = f"{work.name}, {config.num_hidden_layers} layers of {request.model}"
        measured += f" in {request.recipe or config.dtype}"
        for (kernel, key), each in found.items():
            entry = {**each.entry, "measured_in": measured}
            entries.setdefault(kernel, {})[key] = entry
        report[work.name] = {"tried": tried, "of": count, "better": len(found)}
    path = write(request.output, entries)
    note(f"wrote {path}")
    return {"file": str(path), "work": report, "entries": entries}


def _tuned(
    work: Work, until: float, seen: set[Place], note: Note
) -> tuple[dict[Place, Found], int, int]:
    """What was found for one work, and how many configurations were timed of how many.

    Args:
        work: the work.
        until: when to begin no more.
        seen: shapes that were tried in other work; those of this one are added.
        note: told what is going on.
    """
    with tuning.listening() as decisions:
        work.trace()
    decisions = {place: each for place, each in decisions.items() if place not in seen}
    seen.update(decisions)
    count = sum(len(decision.others) for decision in decisions.values())
    note(f"{work.name}: {count} configurations of {len(decisions)} shapes")
    tried = 0

    def time_all(several: Sequence[Configs]) -> Sequence[Timing | None]:
        nonlocal tried
        tried += len(several)
        return work.times(several)

    found = sweep(decisions, time_all, lambda: time.monotonic() > until)
    for (kernel, key), each in found.items():
        change = each.timing.seconds / each.timing.heuristic - 1
        note(f"  {kernel} [{key}]: {each.config}, {change:+.1%}")
    return found, min(tried, count), count


def sweep(
    decisions: Mapping[Place, Decision], time_all: TimeAll, over: Callable[[], bool]
) -> dict[Place, Found]:
    """The configurations that make the work faster, together too.

    Args:
        decisions: what may be tried.
        time_all: times the work with each of several sets of configurations; None for one that does
            not compile, or computes something else.
        over: whether to begin no more.
    """
    best: dict[Place, Found] = {}
    jobs = ordered(decisions)
    for begin in range(0, len(jobs), AT_ONCE):
        if over():
            break
        chunk = jobs[begin : begin + AT_ONCE]
        timings = time_all([{place: config} for place, config in chunk])
        for (place, config), timing in zip(chunk, timings, strict=True):
            if timing is None or timing.gain < LEAST_GAIN:
                continue
            if place not in best or timing.gain > best[place].timing.gain:
                best[place] = Found(config, timing)
    if len(best) < 2:
        return best
    # Gains need not add up. Where they do not, the greatest alone stays.
    place = max(best, key=lambda place: best[place].timing.gain)
    [together] = time_all([{place: found.config for place, found in best.items()}])
    if together is None or together.gain < best[place].timing.gain:
        return {place: best[place]}
    return best


def ordered(decisions: Mapping[Place, Decision]) -> list[tuple[Place, Any]]:
    """All that may be tried: a first one for each shape, then a second one, and so on."""

    def rank(place: Place) -> int:
        return next((i for i, name in enumerate(FIRST) if place[0].startswith(name)), len(FIRST))

    places = sorted(decisions, key=rank)
    rounds = itertools.zip_longest(*(decisions[place].others for place in places))
    return [
        (place, config)
        for configs in rounds
        for place, config in zip(places, configs, strict=True)
        if config is not None
    ]


def cut_model(config: QwenConfig, layers: int | None) -> QwenConfig:
    """The first layers of a model: so many, or so many that each kind of them is there."""
    if layers is None:
        kinds = [(kind, config.is_sparse(i)) for i, kind in enumerate(config.layer_types)]
        last = max(kinds.index(kind) for kind in set(kinds))
        layers = min(config.num_hidden_layers, max(LEAST_LAYERS, last + 1))
    with about("--num-layers"):
        return first_layers(config, layers)


def known_entries(path: Path, kind: str) -> dict[str, tuning.Table]:
    """What a file has already, by version of JAX.

    Raises:
        RequestError: there is a file, and it is no tuning file for this kind of device.
    """
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RequestError(f"{path} is no tuning file ({error}); name another") from error
    if (reason := tuning.mismatch(content, kind)) is not None:
        raise RequestError(
            f"{path} is not overwritten, as {reason}; name another file, or remove this one"
        )
    return content["jax"]


def write(output: Path | None, entries: tuning.Table) -> Path:
    """Write entries beside those that the file has already, of other versions of JAX too.

    A file that is not complete never has the final name.
    """
    path, kind = _place(output), current_target().kind
    known, version = known_entries(path, kind), tuning.jax_version()
    known[version] = tuning.merged(known.get(version, {}), entries)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        text = json.dumps(tuning.content_of(kind, known), indent=2)
        partial.write_text(text + "\n", encoding="utf-8")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def _place(output: Path | None) -> Path:
    """Of the file to write: the user's for this kind of device, or another that was named."""
    if output is not None:
        return output
    return tuning.folder() / tuning.file_name(current_target().kind)


def as_rows(result: dict[str, Any]) -> dict[str, str]:
    """The result for a reader, by name."""
    rows = {
        name: f"{each['tried']} of {each['of']} configurations timed, {each['better']} better"
        for name, each in result["work"].items()
    }
    for kernel, shapes in result["entries"].items():
        for key, entry in shapes.items():
            change = entry["seconds"] / entry["heuristic_seconds"] - 1
            rows[f"{kernel} [{key}]"] = f"{change:+.1%} of {entry['measured_in']}"
    return rows | {"file": result["file"]}
