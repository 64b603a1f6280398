"""Routed experts of a few tokens on a GPU: first right, then fast.

    python benchmarks/kernels/expert_dispatch.py [--only PART_OF_A_NAME] [--sweep] [--output FILE]

Each case of `specs.SPECS` of up to 64 tokens is compared with float64 and the exact numbers that
codes stand for: the first launch, the second given what the first made, and the whole. Its only
rounding is that of what lies between, to bfloat16. It must give the same bits when run again. Then
it is timed, whole and launch by launch; cases in bfloat16 beside XLA's way. The experts of
consecutive calls are others of one stack, and the shared expert is one of sixteen, so that more
than 200 MB lie between two readings of the same. "of copy" is the share of the bandwidth of a 4 GiB
copy that the bytes of a call make, those of different experts. With `--sweep`, other ways to cut
the work are timed too, of fewer cases. Without `--output`, the JSON goes into the folder that $OUT
names, if it names one. Exits with 1 if a case is wrong.
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
import numpy as np

from benchmarks.kernels.expert_cases import (
    Arrays,
    arguments,
    error_of,
    formula_of_down,
    formula_of_gated,
    routings,
)
from benchmarks.kernels.results import Results
from benchmarks.kernels.timing import Chain
from pallas_kernels.expert_dispatch import api, down, gate_up, triton
from pallas_kernels.expert_dispatch.config import FEW_TOKENS, Cut, FewTokens
from pallas_kernels.expert_dispatch.specs import SPECS, Spec

SECONDS = 150
CALLS, XLA_CALLS = 64, 8
SHARED_EXPERTS = 16
THREADS = 8
CHECKED_TOKENS = 8
# Of a launch, before rounding to bfloat16; of the whole, which sums what was rounded.
BAR, WHOLE_BAR = 1e-3, 3e-3
SWEPT = ("1 token", "8 tokens", "32 tokens", "1 token, bf16")
GATE_UP = [
    *(Cut(outputs, 64, 2) for outputs in (2, 4, 8)),
    Cut(4, 32, 1),
    Cut(8, 64, 4),
]
DOWN = [
    *(Cut(outputs, 128, 4) for outputs in (2, 4, 8, 16)),
    Cut(8, 64, 2),
    Cut(8, 128, 8),
]


def check(spec: Spec, given: Arrays, ids: jax.Array) -> dict[str, Any]:
    """The errors, and whether they and the repeated bits are as they must be."""
    arrays = (given[0], ids, *given[2:])
    run = functools.partial(api.OPERATION, implementation="triton", **spec.settings())
    y, again = run(*arrays), run(*arrays)
    rows = jnp.arange(0, spec.tokens, max(1, spec.tokens // CHECKED_TOKENS))
    x, ids, weights, up, below, shared = some = *(each[rows] for each in arrays[:3]), *arrays[3:]
    config, inner = triton.chosen(x, ids, up, below), spec.settings()["inner_dtype"]
    made = gate_up.gated(x, ids, up, shared, inner, config)
    total = down.summed(made, ids, weights, below, shared, None, jnp.dtype("float32"), config.down)
    rounding = 2.0**-9 if inner == jnp.bfloat16 else 0.0
    with jax.enable_x64(True):
        wanted = formula_of_gated(some)
        errors = {
            "gate_up_error": max(map(error_of, made, wanted)),
            "down_error": error_of(total, formula_of_down(made, some)),
            "error": error_of(y[rows], formula_of_down(wanted, some)),
        }
    row: dict[str, Any] = errors | {"bar": WHOLE_BAR, "repeats": bool(jnp.array_equal(y, again))}
    bars = {"gate_up_error": rounding + BAR, "down_error": BAR, "error": WHOLE_BAR}
    row["right"] = row["repeats"] and all(errors[name] <= bar for name, bar in bars.items())
    return row


@dataclasses.dataclass(frozen=True)
class Calls:
    """Consecutive calls of one case.

    Attributes:
        spec: the case.
        x: tokens.
        inputs: ids, weights, stacks and shared expert of each call.
        made: by the first launch of one of them.
    """

    spec: Spec
    x: jax.Array
    inputs: list[Arrays]
    made: tuple[jax.Array, ...]

    @classmethod
    def of(cls, spec: Spec, given: Arrays) -> Calls:
        """With experts in turn."""
        x, _, weights, up, below, shared = given
        several = [shared]
        if shared is not None:
            several = [
                arguments(dataclasses.replace(spec, experts=1), seed)[5]
                for seed in range(SHARED_EXPERTS)
            ]
        ids = routings(spec, CALLS)
        inputs = [
            (one, weights, up, below, several[index % len(several)])
            for index, one in enumerate(ids)
        ]
        config = triton.chosen(x, ids[0], up, below)
        inner = spec.settings()["inner_dtype"]
        made = gate_up.gated(x, ids[0], up, inputs[0][4], inner, config)
        return cls(spec, x, inputs, made)

    def whole(self, implementation: str, calls: int) -> Chain:
        """Of an implementation."""
        run = functools.partial(
            api.OPERATION, implementation=implementation, **self.spec.settings()
        )
        return Chain.of_equals(lambda x, rest: run(x, *rest), self.x, self.inputs[:calls], calls)

    def first(self, cut: Cut, shared_outputs: int) -> Chain:
        """The first launch alone."""
        config = FewTokens(cut, cut, shared_outputs)
        inner = self.spec.settings()["inner_dtype"]

        def run(x: jax.Array, rest: Arrays) -> jax.Array:
            ids, _, up, _, shared = rest
            return gate_up.gated(x, ids, up, shared, inner, config)[0]

        return Chain.of_equals(run, self.x, self.inputs, CALLS)

    def second(self, cut: Cut) -> Chain:
        """The second launch alone."""

        def run(made: jax.Array, rest: Arrays) -> jax.Array:
            ids, weights, _, below, shared = rest
            all_made = (made, *self.made[1:])
            return down.summed(all_made, ids, weights, below, shared, None, jnp.float32, cut)

        return Chain.of_equals(run, self.made[0], self.inputs, CALLS)

    @property
    def nbytes(self) -> float:
        """Bytes that a call must read, on average: those of its different experts."""
        _, _, up, below, shared = self.inputs[0]
        different = np.mean([len(np.unique(np.asarray(each[0]))) for each in self.inputs])
        stacks = sum(leaf.nbytes for leaf in jax.tree.leaves((up, below)))
        own = sum(leaf.nbytes for leaf in jax.tree.leaves(shared))
        return float(stacks * different / self.spec.experts + own)


def timed(calls: Calls, copy: float) -> dict[str, Any]:
    """Times of the whole, of each launch, and of XLA for numbers."""
    config = triton.chosen(calls.x, calls.inputs[0][0], *calls.inputs[0][2:4])
    chains = {
        "seconds": calls.whole("triton", CALLS),
        "gate_up_seconds": calls.first(config.gate_up, config.shared_outputs),
        "down_seconds": calls.second(config.down),
    }
    if calls.spec.bits >= 16:
        chains["xla_seconds"] = calls.whole("reference", XLA_CALLS)
    row: dict[str, Any] = {name: chain.seconds() for name, chain in chains.items()}
    row["config"] = dataclasses.asdict(config)
    return row | {"of_copy": calls.nbytes / row["seconds"] / copy}


def sweep(calls: Calls) -> dict[str, list[dict[str, Any]]]:
    """Times of other configurations of each launch, the fastest first."""
    firsts = [
        (cut, shared) for cut in GATE_UP for shared in sorted({cut.outputs_at_once, cut.outputs})
    ]
    jobs: list[tuple[str, dict[str, Any], Callable[[], Chain]]] = [
        (
            "gate_up",
            dataclasses.asdict(cut) | {"shared_outputs": shared},
            functools.partial(calls.first, cut, shared),
        )
        for cut, shared in firsts
    ]
    jobs += [
        ("down", dataclasses.asdict(cut), functools.partial(calls.second, cut)) for cut in DOWN
    ]

    def compiled(job: tuple[str, dict[str, Any], Callable[[], Chain]]) -> Chain | str:
        try:
            return job[2]()
        except Exception as reason:
            # Such as one that wants more shared memory than there is.
            return str(reason).splitlines()[0]

    with ThreadPoolExecutor(THREADS) as pool:
        chains = list(pool.map(compiled, jobs))
    found: dict[str, list[dict[str, Any]]] = {"gate_up": [], "down": []}
    for (launch, cut, _), chain in zip(jobs, chains, strict=True):
        if isinstance(chain, str):
            print(f"    {launch} {cut}: {chain}", flush=True)
        else:
            found[launch].append({**cut, "seconds": chain.seconds()})
    return {name: sorted(rows, key=lambda row: row["seconds"]) for name, rows in found.items()}


def main() -> int:
    """Check and time the cases that the arguments select."""
    results = Results.begin("expert_dispatch", "routed experts", seconds=SECONDS)
    assert results.copy is not None
    few = [name for name, spec in SPECS.items() if spec.tokens <= FEW_TOKENS]
    for name in results.selected(SWEPT if results.args.sweep else few):
        spec = SPECS[name]
        given = arguments(spec)
        row = check(spec, given, routings(spec, 1)[0])
        calls = Calls.of(spec, given)
        row |= timed(calls, results.copy)
        if results.args.sweep:
            row["sweep"] = sweep(calls)
        results.add(name, row)
    return results.finish(_print_table)


def _print_table(figures: dict[str, dict[str, Any]]) -> None:
    names = ("error", "us", "gate/up", "down", "of copy", "XLA us")
    print(f"\n{'case':30} " + " ".join(f"{name:>8}" for name in names))
    for name, row in figures.items():
        times = [row[f"{part}seconds"] * 1e6 for part in ("", "gate_up_", "down_")]
        cells = [f"{name:30} {row['error']:8.1e}", *(f"{time:8.2f}" for time in times)]
        cells.append(f"{row['of_copy']:8.1%}")
        if "xla_seconds" in row:
            cells.append(f"{row['xla_seconds'] * 1e6:8.1f}")
        print(" ".join(cells) + ("" if row["right"] else "  WRONG"))
        for launch, others in row.get("sweep", {}).items():
            for other in others:
                cut = "  ".join(
                    f"{key} {value}" for key, value in other.items() if key != "seconds"
                )
                print(f"    {launch:8} {other['seconds'] * 1e6:8.2f}  {cut}")


if __name__ == "__main__":
    sys.exit(main())
