"""Experts of many tokens on a GPU: first right, then fast.

    python benchmarks/kernels/expert_prefill.py [--only PART_OF_A_NAME] [--sweep] [--output FILE]

Each case is compared with float64 formulas of the exact numbers that the codes stand for, at some
of the tokens, and must give the same bits when run again. Then the whole call is timed beside two
plain products of as many multiplications in bfloat16 (all slots, one matrix), and its parts alone:
sorting, the two grouped products (with making matrices in bfloat16, where that is done), the sum.
"of copy" is the share of the bandwidth of a 4 GiB copy that the bytes of weights and tokens make.
With `--sweep`, other ways to cut each of the two products are timed. Without `--output`, the JSON
goes into the folder that $OUT names, if it names one. Exits with 1 if a case is wrong.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import jax
import jax.numpy as jnp

from benchmarks.kernels.expert_prefill_cases import CASES, Arrays, Case, arguments, error
from benchmarks.kernels.results import Results
from benchmarks.kernels.timing import Chain
from pallas_kernels._compat import current_target
from pallas_kernels.dequant_matmul import layout
from pallas_kernels.expert_dispatch import combine, sorting
from pallas_kernels.expert_dispatch import many_tokens as kernels
from pallas_kernels.expert_dispatch.many_tokens_config import Grouped, ManyTokens, heuristic

SECONDS = 240
THREADS = 8
CALLS, MANY_CALLS = 16, 4


SWEPT = ("512 tokens", "8192 tokens", "2048 tokens", "128 tokens", "8192 tokens, bfloat16")
FEW = [
    *(
        (rows, Grouped(outputs, units, warps, stages))
        for rows in (16, 32)
        for outputs, units, warps, stages in (
            (64, 2, 4, 2),
            (64, 2, 4, 3),
            (64, 2, 4, 4),
            (64, 4, 4, 3),
            (64, 4, 4, 4),
            (128, 2, 8, 3),
            (128, 4, 8, 3),
            (32, 2, 2, 3),
            (32, 4, 2, 3),
        )
    ),
    (64, Grouped(64, 2, 4, 3)),
    (64, Grouped(128, 2, 8, 3)),
]
MANY = [
    (64, Grouped(128, 2, 8, 3)),
    (64, Grouped(256, 2, 8, 3)),
    (128, Grouped(64, 2, 4, 3)),
    (128, Grouped(64, 2, 4, 4)),
    (128, Grouped(128, 2, 8, 3)),
    (128, Grouped(128, 2, 8, 4)),
    (128, Grouped(128, 4, 8, 2)),
    (256, Grouped(64, 2, 8, 3)),
]
SETTINGS: dict[str, Any] = {
    "shared": None,
    "residual": None,
    "inner_dtype": jnp.bfloat16,
    "dtype": jnp.float32,
}


def check(case: Case, config: ManyTokens, arrays: Arrays) -> dict[str, Any]:
    """The error, and whether it and the repeated bits are as they must be."""
    run = jax.jit(functools.partial(kernels.many_tokens, **SETTINGS, config=config))
    y, again = run(*arrays), run(*arrays)
    with jax.enable_x64(True):
        found = float(error(case, arrays, y))
    row: dict[str, Any] = {"error": found, "bar": 3e-3 if exact(case, config) else 4e-3}
    row["repeats"] = bool(jnp.array_equal(y, again))
    row["right"] = found <= row["bar"] and row["repeats"]
    return row


def exact(case: Case, config: ManyTokens) -> bool:
    """Whether weights are multiplied without rounding."""
    units = case.group_size // layout.UNIT
    cuts = config.gate_up, config.down
    sums = all(cut.units <= units and cut.turns == 1 for cut in cuts)
    return case.bits == 16 or (not config.unpacked and sums)


def chain(case: Case, run: Callable[..., Any], arrays: Arrays) -> Chain:
    """Calls of a function of these arrays."""
    calls = CALLS if case.tokens <= 512 else MANY_CALLS
    x, *rest = arrays
    return Chain.of_equals(lambda x, rest: run(x, *rest), x, [rest], calls)


def parts(case: Case, config: ManyTokens, arrays: Arrays) -> dict[str, tuple[Any, Arrays]]:
    """Parts of the call by name: functions and arguments. What lies between them is random."""
    x, ids, weights, up, down = arrays
    tiles = jax.jit(lambda ids: sorting.sort(ids, case.experts, config.rows))(ids)
    made, y = (between(ids.size, width) for width in (case.hidden, case.width))
    return {
        "sort": (lambda ids: sorting.sort(ids, case.experts, config.rows).slot, (ids,)),
        "gated": (
            lambda x, tiles, up: kernels.gated(x, case.slots, tiles, up, config),
            (x, tiles, up),
        ),
        "down": (
            lambda made, tiles, down: kernels.down(made, tiles, down, config),
            (made, tiles, down),
        ),
        "sum": (
            lambda y, ids, weights: combine.summed(y, ids, weights, case.experts, jnp.float32),
            (y, ids, weights),
        ),
    }


@functools.cache
def between(rows: int, width: int) -> jax.Array:
    """What a product makes and the next part reads."""
    return jax.jit(lambda key: jax.random.normal(key, (rows, width), jnp.bfloat16))(
        jax.random.key(0)
    )


def timed(case: Case, config: ManyTokens, arrays: Arrays, copy: float) -> dict[str, Any]:
    """Times of the call, its parts and XLA, and the bytes."""
    run = functools.partial(kernels.many_tokens, **SETTINGS, config=config)
    row: dict[str, Any] = {"seconds": chain(case, run, arrays).seconds()}
    for name, (part, of_part) in parts(case, config, arrays).items():
        row[f"{name}_seconds"] = chain(case, part, of_part).seconds()
    slots = case.tokens * case.slots
    wide = jnp.ones((slots, case.width), jnp.bfloat16)
    up = jnp.ones((2 * case.hidden, case.width), jnp.bfloat16)
    down = jnp.ones((case.width, case.hidden), jnp.bfloat16)

    def plain(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        gate, value = jnp.split(jnp.einsum("si,oi->so", x, up), 2, axis=1)
        return jnp.einsum("si,oi->so", gate * value, down)

    row["xla_seconds"] = chain(case, plain, (wide, up, down)).seconds()
    touched = min(case.experts, case.slots if case.crowded else slots) / case.experts
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(arrays[3:])) * touched
    nbytes = weights + 2 * arrays[0].nbytes
    row["of_copy"] = nbytes / row["seconds"] / copy
    row["tflops"] = 6 * slots * case.width * case.hidden / row["seconds"] / 1e12
    return row


def sweep(case: Case, arrays: Arrays) -> list[dict[str, Any]]:
    """Times of both products for other configurations, the fastest first."""
    mean = case.tokens * case.slots / case.experts
    cuts = [*FEW] if mean < 96 else [*MANY]
    if 32 <= mean < 96:
        cuts += MANY
    ways = (False,) if case.bits == 16 or mean < 32 else (False, True)
    jobs = [
        (name, ManyTokens(rows, cut, cut, unpacked))
        for rows, cut in cuts
        for unpacked in ways
        for name in ("gated", "down")
    ]

    def compiled(job: tuple[str, ManyTokens]) -> Chain | str:
        name, config = job
        try:
            return chain(case, *parts(case, config, arrays)[name])
        except Exception as reason:
            # Such as one that wants more shared memory than there is.
            return str(reason).splitlines()[0]

    rows = []
    with ThreadPoolExecutor(THREADS) as pool:
        chains = list(pool.map(compiled, jobs))
    for (name, config), found in zip(jobs, chains, strict=True):
        cut = {"part": name, "rows": config.rows, "unpacked": config.unpacked}
        cut |= dataclasses.asdict(config.gate_up)
        if isinstance(found, str):
            print(f"    {cut}: {found}", flush=True)
            continue
        rows.append({**cut, "seconds": found.seconds()})
    return sorted(rows, key=lambda row: (row["part"], row["seconds"]))


def main() -> int:
    """Check and time the cases that the arguments select."""
    results = Results.begin("expert_prefill", "experts of many tokens", seconds=SECONDS)
    assert results.copy is not None
    for name in results.selected(SWEPT if results.args.sweep else CASES):
        case = CASES[name]
        arrays = arguments(case)
        config = heuristic(current_target(), case.tokens, case.slots, case.experts)
        row = check(case, config, arrays)
        row |= timed(case, config, arrays, results.copy)
        row["config"] = dataclasses.asdict(config)
        if results.args.sweep:
            row["sweep"] = sweep(case, arrays)
        results.add(name, row)
    return results.finish(_print_table)


def _print_table(figures: dict[str, dict[str, Any]]) -> None:
    times = ("", "sort_", "gated_", "down_", "sum_", "xla_")
    names = ("error", "us", "sort", "gated", "down", "sum", "XLA", "TFLOP/s", "of copy")
    print(f"\n{'case':40} " + " ".join(f"{name:>8}" for name in names))
    for name, row in figures.items():
        cells = [f"{name:40} {row['error']:8.1e}"]
        cells += [f"{row[f'{part}seconds'] * 1e6:8.1f}" for part in times]
        cells.append(f"{row['tflops']:8.1f} {row['of_copy']:8.1%}")
        print(" ".join(cells) + ("" if row["right"] else "  WRONG"))
        for other in row.get("sweep", []):
            cut = "  ".join(f"{key} {value}" for key, value in other.items() if key != "seconds")
            print(f"    {other['seconds'] * 1e6:8.1f}  {cut}")


if __name__ == "__main__":
    sys.exit(main())
