"""Prefill attention on a GPU, of whole sequences and against cached blocks: first right, then fast.

    python benchmarks/kernels/flash_attention.py [--only PART_OF_A_NAME] [--sweep] [--output FILE]

Sampled queries of each case are compared with a float64 softmax on the host, with NaN in padding
and in all rows of the pool that hold no token, and the whole result must be finite and the same
when run again. "error" is the greatest difference of a token over the root mean square of its
result, "of all" over that of all sampled results. Then it is timed: `flash_attention`, cuDNN where
it takes the call, and `block_attention` with many new tokens. With `--sweep`, other ways to cut the
work are timed too. Without `--output`, the JSON goes into the folder that $OUT names, if it names
one. Exits with 1 if a case is wrong.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import jax
import numpy as np

from benchmarks.kernels.prefill_cases import Inputs, block_inputs, flash_inputs
from benchmarks.kernels.results import Results
from benchmarks.kernels.timing import seconds_per_call
from pallas_kernels._compat import current_target
from pallas_kernels.attention.cut import Cut, cut_for
from pallas_kernels.block_attention import block_attention, prefill
from pallas_kernels.block_attention.specs import SPECS as BLOCK_SPECS
from pallas_kernels.flash_attention import api, flash_attention, triton
from pallas_kernels.flash_attention.specs import SPECS as FLASH_SPECS
from pallas_kernels.testing import prefill_bar, relative_error, token_error

REPEATS = 5
SECONDS = 75
CALLS_A_STEP = 4
FLASH_CASES = ("8k", "32 x 512", "packed, ragged", "8k, 28 heads of 128", "4k, float32")
BLOCK_CASES = ("8k new", "512 new on 32k", "512 new, unequal")

# Rows, tile, warps, stages, and a number of splits where it is not 1.
SWEPT: dict[str, list[tuple[int, ...]]] = {
    "flash: 8k": [
        (128, 64, 8, 2),
        (128, 32, 8, 3),
        (128, 32, 8, 4),
        (64, 64, 4, 2),
        (64, 64, 4, 3),
        (64, 32, 4, 2),
        (64, 32, 4, 3),
        (128, 64, 16, 2),
    ],
    "blocks: 8k new": [
        (128, 64, 8, 2),
        (128, 64, 8, 3),
        (128, 32, 8, 5),
        (128, 32, 8, 7),
        (64, 64, 4, 3),
        (64, 32, 4, 3),
    ],
    "blocks: 512 new on 32k": [
        (128, 64, 8, 2, 1),
        (128, 64, 8, 2, 2),
        (128, 64, 8, 3, 2),
        (128, 64, 8, 2, 4),
        (64, 64, 4, 2, 1),
        (64, 32, 4, 2, 2),
    ],
    "flash: 32 x 512": [(128, 64, 8, 2), (64, 64, 4, 2), (64, 32, 4, 2), (128, 32, 8, 4)],
    "flash: 512": [(128, 64, 8, 2), (64, 64, 4, 2), (64, 64, 4, 3), (64, 32, 4, 3), (32, 64, 4, 2)],
    "flash: 8k, 28 heads of 128": [
        (128, 128, 8, 2),
        (128, 128, 8, 3),
        (128, 64, 8, 2),
        (128, 64, 8, 3),
        (64, 64, 4, 3),
        (64, 128, 4, 2),
    ],
    "flash: 4k, float32": [(32, 16, 8, 2), (16, 32, 8, 2), (16, 16, 4, 2), (64, 16, 8, 2)],
}


@dataclasses.dataclass(frozen=True)
class Case:
    """What is run for a name.

    Attributes:
        runs: by name of the implementation, a function of the call's arrays.
        cut_by: the kernel's function with a keyword `cut`.
        cut: the heuristic's.
    """

    runs: dict[str, Callable[..., jax.Array]]
    cut_by: Callable[..., jax.Array]
    cut: Cut


def flash_case(inputs: Inputs) -> Case:
    """`flash_attention`, by all that take the call."""
    q, k = inputs.arrays[:2]
    runs = {}
    for name in ("triton", "cudnn"):
        choice = api.OPERATION.choose(*inputs.arrays, implementation=name, **inputs.settings)
        if choice.chosen:
            runs[name] = functools.partial(flash_attention, implementation=name, **inputs.settings)
    cut_by = functools.partial(triton.flash_attention, **inputs.settings)
    return Case(runs, cut_by, cut_for(current_target(), q, k.shape[2]))


def block_case(inputs: Inputs) -> Case:
    """`block_attention` with many new tokens."""
    q, key_blocks, _, table, _ = inputs.arrays
    run = functools.partial(block_attention, implementation="triton", **inputs.settings)
    cut_by = functools.partial(prefill.prefill, **inputs.settings)
    cut = prefill.block_cut(current_target(), q, key_blocks, table)
    return Case({"triton": run}, cut_by, cut)


def cases(swept: bool) -> Iterator[tuple[str, Callable[[], tuple[Inputs, Case]]]]:
    """Name and maker of each case."""
    for name in FLASH_SPECS:
        label = f"flash: {name}"
        if label in SWEPT if swept else name in FLASH_CASES:

            def make(spec=FLASH_SPECS[name]) -> tuple[Inputs, Case]:
                inputs = flash_inputs(spec)
                return inputs, flash_case(inputs)

            yield label, make
    for name in BLOCK_SPECS:
        label = f"blocks: {name}"
        if label in SWEPT if swept else name in BLOCK_CASES:

            def make(spec=BLOCK_SPECS[name]) -> tuple[Inputs, Case]:
                inputs = block_inputs(spec)
                return inputs, block_case(inputs)

            yield label, make


def check(inputs: Inputs, expected: np.ndarray, run: Callable[..., jax.Array]) -> dict[str, Any]:
    """Errors of the sampled queries, their bar, and whether the bits repeat."""
    compiled = jax.jit(run)
    result = np.asarray(compiled(*inputs.arrays))
    again = [np.asarray(compiled(*inputs.arrays)) for _ in range(REPEATS)]
    rows, tokens, _ = zip(*inputs.sampled, strict=True)
    sampled = result[list(rows), list(tokens)]
    row = {
        "error": token_error(sampled, expected),
        "of_all": relative_error(sampled, expected),
        "bar": prefill_bar(expected, str(result.dtype)),
        "repeats": all(np.array_equal(result, other) for other in again),
    }
    finite = bool(np.isfinite(result.astype(np.float32)).all())
    empty = not result[inputs.padding].any()
    row["right"] = bool(row["error"] <= row["bar"] and row["repeats"] and finite and empty)
    return row


def measure(inputs: Inputs, run: Callable[..., jax.Array]) -> float:
    """Seconds a call: the result of one is the queries of the next."""

    def call(q: jax.Array, rest: tuple[jax.Array, ...], _: Any) -> jax.Array:
        return run(q, *rest)

    return seconds_per_call(call, inputs.arrays[0], [inputs.arrays[1:]], (), calls=CALLS_A_STEP)


def sweep(inputs: Inputs, case: Case, cuts: list[tuple[int, ...]]) -> list[dict[str, Any]]:
    """Times of other cuts, the fastest first."""
    rows = []
    for fields in cuts:
        cut = Cut(*fields)
        try:
            seconds = measure(inputs, functools.partial(case.cut_by, cut=cut))
        except Exception as error:
            print(f"    {cut}: {str(error)[:200]}", flush=True)
            continue
        rows.append({**dataclasses.asdict(cut), "seconds": seconds})
        print(f"    {seconds * 1e6:9.1f} us  {cut}", flush=True)
    return sorted(rows, key=lambda row: row["seconds"])


def main() -> int:
    """Check and time the cases that the arguments select."""
    results = Results.begin("flash_attention", "prefill attention", seconds=SECONDS, copy=False)
    makers = dict(cases(results.args.sweep))
    for name in results.selected(makers):
        inputs, case = makers[name]()
        if results.args.sweep:
            row = {"cut": dataclasses.asdict(case.cut), "flops": inputs.flops}
            results.add(name, row | {"sweep": sweep(inputs, case, SWEPT[name])})
            continue
        expected = inputs.expected()
        for implementation, run in case.runs.items():
            row = check(inputs, expected, run)
            row |= {"seconds": measure(inputs, run), "flops": inputs.flops}
            results.add(f"{name}, {implementation}", row)
    return results.finish(_print_sweep if results.args.sweep else _print_table)


def _print_table(figures: dict[str, dict[str, Any]]) -> None:
    heads = (f"{head:>8}" for head in ("error", "bar", "of all"))
    print(f"\n{'case':40} {' '.join(heads)} {'bits':>6} {'us':>9} {'TFLOP/s':>8}")
    for name, row in figures.items():
        cells = (
            f"{name:40}",
            *(f"{row[key]:8.1e}" for key in ("error", "bar", "of_all")),
            f"{'same' if row['repeats'] else 'DIFFER':>6}",
            f"{row['seconds'] * 1e6:9.1f}",
            f"{row['flops'] / row['seconds'] / 1e12:8.0f}{'' if row['right'] else '  WRONG'}",
        )
        print(" ".join(cells))


def _print_sweep(figures: dict[str, dict[str, Any]]) -> None:
    for name, row in figures.items():
        print(f"\n{name}; the heuristic takes {row['cut']}")
        for other in row["sweep"]:
            cut = "  ".join(f"{key} {value}" for key, value in other.items() if key != "seconds")
            rate = row["flops"] / other["seconds"] / 1e12
            print(f"    {other['seconds'] * 1e6:9.1f} us {rate:5.0f} TFLOP/s  {cut}")


if __name__ == "__main__":
    sys.exit(main())
