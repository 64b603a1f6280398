"""Several benchmarks in one process: the table of README.md, with each model made once.

python benchmarks/bench_cases.py                      all of the table that runs on our kernels
python benchmarks/bench_cases.py q3 q3-b32 qwen3-30b-a3b/q3 bf16-p8192-g16 --ahead

A case is [MODEL/]RECIPE[-bROWS][-pPROMPT][-gNEW], and gives what `benchmarks/bench.py` gives of it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.bench import result_of, write
from qwen_jax.cli import FAILURE, SUCCESS, guarded
from qwen_jax.cli.bench_request import BenchRequest
from qwen_jax.cli.console import Notes
from qwen_jax.cli.environment import prepare_environment
from qwen_jax.cli.flags import about
from qwen_jax.errors import RequestError

if TYPE_CHECKING:
    from qwen_jax.cli.measure import Prepared
    from qwen_jax.config import QwenConfig
    from qwen_jax.model import CausalLM

RESULTS = Path(__file__).parent / "results"
MODEL = "qwen3.6-35b-a3b"
FLOATS = "bf16"
CASES = (
    *("q3", "q3-b8", "q3-b32", "q3-b64", "q3-p8192-g16", "q3-p32768"),
    *(FLOATS, "qwen3-30b-a3b/q3"),
)
LETTERS = {"batch_size": "b", "prompt_tokens": "p", "generation_tokens": "g"}
FORM = re.compile(
    r"(?:(?P<model>.+)/)?(?P<recipe>[^/]+?)"
    + "".join(rf"(?:-{letter}(?P<{field}>\d+))?" for field, letter in LETTERS.items()),
    re.ASCII,
)
THREADS = 8


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the cases, and write and print each as soon as it is there."""
    prepare_environment()
    return guarded(lambda: _bench_cases(_parser().parse_args(arguments)))


def _bench_cases(arguments: argparse.Namespace) -> int:
    began, failed, notes = time.monotonic(), False, Notes()
    requests = _requests(arguments)

    from qwen_jax.cli.report import as_text

    session = Session(list(requests.values()), notes, ahead=arguments.ahead)
    for name, request in requests.items():
        if arguments.seconds is not None and time.monotonic() - began > arguments.seconds:
            notes(f"{name}: not begun, since {arguments.seconds} seconds are over")
            continue
        notes(f"{name}:")
        try:
            result = session.result(request, arguments.commit)
        except Exception as error:
            # The other cases are not lost for it.
            notes(f"{name} failed: {type(error).__name__}: {error}")
            failed = True
            continue
        folder = arguments.folder or _folder(result["device"]["kind"])
        write(result, folder / f"bench-{name}.json")
        print(as_text(result), end="\n\n", flush=True)
    return FAILURE if failed else SUCCESS


class Session:
    """Measures cases one after the other, and holds the model of the last one.

    Args:
        requests: all that will be measured, those of a model behind one another.
        notes: told what is going on.
        ahead: compile what all cases of a model need as soon as it is made.
    """

    def __init__(self, requests: Sequence[BenchRequest], notes: Notes, *, ahead: bool) -> None:
        from benchmarks.ballast import Ballast

        self._requests, self._notes, self._ahead = requests, notes, ahead
        self._ballast = Ballast()
        self._weights: tuple[str, str | None] | None = None
        self._prepared: Prepared | None = None
        self._made_peak: int | None = None
        # Whether the process has done what a process for one case would not have.
        self._used = False

    def result(self, request: BenchRequest, commit: str | None = None) -> dict[str, Any]:
        """What `bench.py` gives, without what a process of its own alone can tell.

        Peak memory is that of making the model and running the case, whatever ran before.
        """
        prepared = self._model(request)
        if self._used:
            self._ballast.fill(_cache_bytes(prepared.config, request))
        self._used = True
        result = result_of(request, self._notes, commit, prepared)
        figures = result["figures"]
        figures["peak_memory_bytes"] = self._peak(figures["peak_memory_bytes"])
        if self._ahead:
            figures["compile_seconds"] = figures["compilation"] = None
        if self._ahead or len(self._requests) > 1:
            figures.pop("start_seconds")
        return result

    def _peak(self, peak: int) -> int | None:
        """Of the case, from the peak of the process."""
        own = self._ballast.own(peak)
        return None if own is None or self._made_peak is None else max(own, self._made_peak)

    def _model(self, request: BenchRequest) -> Prepared:
        from qwen_jax.accounting import weight_bytes
        from qwen_jax.cli.measure import configuration, prepare
        from qwen_jax.memory import peak_memory

        if self._prepared is None or _weights(request) != self._weights:
            first, self._prepared = self._weights is None, None
            self._weights = _weights(request)
            if not first:
                _, config, scheme = configuration(request, Notes(quiet=True))
                self._ballast.fill(weight_bytes(config, scheme) + _cache_bytes(config, request))
            self._prepared = prepare(request, self._notes)
            self._made_peak = self._ballast.own(peak_memory())
            if self._ahead:
                alike = [other for other in self._requests if _weights(other) == self._weights]
                self._notes(f"compiling for {len(alike)} cases ...")
                _compile(self._prepared.model, alike)
                self._used = True
        return self._prepared


def _compile(model: CausalLM, requests: Iterable[BenchRequest]) -> None:
    """Compile the large programs of all requests beside one another."""
    from qwen_jax.cli.trials import Trials

    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool:
        for request in requests:
            # A case that fails here says why in its turn.
            with contextlib.suppress(Exception):
                for program in Trials(model, request).programs():
                    pool.submit(program.compile)


def _weights(request: BenchRequest) -> tuple[str, str | None]:
    return request.model, request.recipe


def _cache_bytes(config: QwenConfig, request: BenchRequest) -> int:
    from qwen_jax.accounting import cache_bytes

    return cache_bytes(config, request.batch_size, request.length, request.kv_cache_dtype)


def _requests(arguments: argparse.Namespace) -> dict[str, BenchRequest]:
    """By name, those of a model behind one another; all checked before any is measured.

    Raises:
        RequestError: a case of another form, or of a model, recipe or size that there is not.
    """
    from qwen_jax.cli.measure import configuration

    groups: dict[tuple[str, str | None], dict[str, BenchRequest]] = {}
    for case in arguments.cases or CASES:
        with about(f"case {case!r}"):
            request = parse(case, arguments.num_trials, arguments.num_layers)
            configuration(request, Notes(quiet=True))
        groups.setdefault(_weights(request), {})[name_of(request)] = request
    return {name: request for group in groups.values() for name, request in group.items()}


def parse(case: str, num_trials: int = 3, num_layers: int | None = None) -> BenchRequest:
    """What a case asks for.

    Raises:
        RequestError: it has another form, an unknown recipe, or a number out of range.
    """
    from qwen_jax.quant import RECIPES

    found = FORM.fullmatch(case)
    recipe = found["recipe"] if found else ""
    if found is None or recipe not in (FLOATS, *RECIPES):
        raise RequestError(
            f"there is no recipe {recipe!r}; accepted is [MODEL/]RECIPE[-bROWS][-pPROMPT][-gNEW] "
            f"with one of the recipes {FLOATS}, {', '.join(RECIPES)}"
        )
    sizes: dict[str, Any] = {
        field: int(found[field]) for field in LETTERS if found[field] is not None
    }
    return BenchRequest(
        model=found["model"] or MODEL,
        dummy=True,
        recipe=None if recipe == FLOATS else recipe,
        num_trials=num_trials,
        num_layers=num_layers,
        **sizes,
    )


def name_of(request: BenchRequest) -> str:
    """A case in its shortest form, fit for a file's name; with rows where it is nothing else."""
    usual = BenchRequest(model=MODEL)
    sizes = [
        f"-{letter}{getattr(request, field)}"
        for field, letter in LETTERS.items()
        if getattr(request, field) != getattr(usual, field)
    ]
    name = (request.recipe or FLOATS) + ("".join(sizes) or "-b1")
    if request.model != MODEL:
        name = f"{re.sub(r'[^A-Za-z0-9_.]+', '-', request.model).strip('-')}-{name}"
    # Not to be taken for the whole model.
    return name if request.num_layers is None else f"{name}-{request.num_layers}-layers"


def _folder(device: str) -> Path:
    if "OUT" in os.environ:
        return Path(os.environ["OUT"])
    short = device.lower().removeprefix("nvidia ").replace(" ", "-")
    return RESULTS / short


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Measure several cases in one process.")
    parser.add_argument(
        "cases",
        nargs="*",
        metavar="CASE",
        help="[MODEL/]RECIPE[-bROWS][-pPROMPT][-gNEW], such as q3-b8 or qwen3-30b-a3b/bf16; "
        f"by default {' '.join(CASES)}",
    )
    parser.add_argument("--num-trials", type=int, default=3, help="measured repetitions (3)")
    parser.add_argument("--num-layers", type=int, help="only so many layers, for trying this out")
    parser.add_argument(
        "--ahead", action="store_true", help="compile all programs of a model at once, untimed"
    )
    parser.add_argument("--seconds", type=int, help="begin no case after so many")
    parser.add_argument(
        "--folder", type=Path, help="where to write; $OUT, or the device's in benchmarks/results"
    )
    parser.add_argument("--commit", help="the commit, where the code is a copy without its history")
    return parser


if __name__ == "__main__":
    sys.exit(main())
