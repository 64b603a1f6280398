"""Routed experts of a few tokens on a GPU: first right, then fast.

    python benchmarks/kernels/expert_dispatch.py [--only PART_OF_A_NAME] [--sweep] [--output FILE]

Each case of `specs.SPECS` of up to 64 tokens is compared with float64 and the exact numbers that
codes stand for. Its only rounding is that of what lies between, to bfloat16; tokens are numbers
that bfloat16 has. It must give the same bits when run again. Then it is timed; cases in bfloat16
beside XLA's way, and those that another implementation takes beside Triton's. The experts of
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
from pallas_kernels.expert_dispatch import api, triton
from pallas_kernels.expert_dispatch.config import FEW_TOKENS, Config, others
from pallas_kernels.expert_dispatch.specs import SPECS, Spec

SECONDS = 150
CALLS, XLA_CALLS = 64, 8
SHARED_EXPERTS = 16
THREADS = 8
CHECKED_TOKENS = 8
BAR = 3e-3
SWEPT = ("1 token", "8 tokens", "32 tokens", "1 token, bf16")


def check(spec: Spec, given: Arrays, ids: jax.Array) -> dict[str, Any]:
    """The errors, and whether they and the repeated bits are as they must be."""
    arrays = (given[0], ids, *given[2:])
    run = functools.partial(api.OPERATION, implementation=taken_by(spec), **spec.settings())
    y, again = run(*arrays), run(*arrays)
    rows = jnp.arange(0, spec.tokens, max(1, spec.tokens // CHECKED_TOKENS))
    some = *(each[rows] for each in arrays[:3]), *arrays[3:]
    with jax.enable_x64(True):
        error = error_of(y[rows], formula_of_down(formula_of_gated(some), some))
    repeats = bool(jnp.array_equal(y, again))
    return {"error": error, "bar": BAR, "repeats": repeats, "right": repeats and error <= BAR}


def taken_by(spec: Spec) -> str:
    """The implementation that calls of a case get here."""
    choice = api.OPERATION.choose(*spec.arguments(), implementation=None, **spec.settings())
    assert choice.chosen is not None
    return choice.chosen


@dataclasses.dataclass(frozen=True)
class Calls:
    """Consecutive calls of one case.

    Attributes:
        spec: the case.
        x: tokens.
        inputs: ids, weights, stacks and shared expert of each call.
    """

    spec: Spec
    x: jax.Array
    inputs: list[Arrays]

    @classmethod
    def in_turn(cls, spec: Spec, given: Arrays) -> Calls:
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
        return cls(spec, x, inputs)

    def chain(self, run: Callable[..., jax.Array], calls: int = CALLS) -> Chain:
        """Of (x, ids, weights, stacks, shared expert) -> result."""
        return Chain.of_equals(lambda x, rest: run(x, *rest), self.x, self.inputs[:calls], calls)

    def of(self, implementation: str, calls: int = CALLS) -> Chain:
        """Of an implementation."""
        settings = self.spec.settings()
        run = functools.partial(api.OPERATION, implementation=implementation, **settings)
        return self.chain(run, calls)

    @property
    def config(self) -> Config:
        """Which the Triton implementation takes."""
        ids, _, up, below, shared = self.inputs[0]
        inner = self.spec.settings()["inner_dtype"]
        return triton.chosen(self.x, ids, up, below, shared, inner)

    @property
    def nbytes(self) -> float:
        """Bytes that a call must read, on average: those of its different experts."""
        _, _, up, below, shared = self.inputs[0]
        different = np.mean([len(np.unique(np.asarray(each[0]))) for each in self.inputs])
        stacks = sum(leaf.nbytes for leaf in jax.tree.leaves((up, below)))
        own = sum(leaf.nbytes for leaf in jax.tree.leaves(shared))
        return float(stacks * different / self.spec.experts + own)


def timed(calls: Calls, copy: float) -> dict[str, Any]:
    """Times: of numbers those of XLA too, and those of Triton where calls get something else."""
    name = taken_by(calls.spec)
    row: dict[str, Any] = {"implementation": name, "seconds": calls.of(name).seconds()}
    if calls.spec.bits >= 16:
        row["xla_seconds"] = calls.of("reference", XLA_CALLS).seconds()
    if name == "triton":
        row["config"] = described(calls.config)
    else:
        row["triton_seconds"] = calls.of("triton").seconds()
    return row | {"of_copy": calls.nbytes / row["seconds"] / copy}


def described(config: Config) -> dict[str, Any]:
    """For JSON."""
    return {"kind": type(config).__name__, **dataclasses.asdict(config)}


def sweep(calls: Calls) -> list[dict[str, Any]]:
    """Times of other configurations, the fastest first."""

    def compiled(config: Config) -> Chain | str:
        settings = calls.spec.settings()
        run = functools.partial(triton.expert_dispatch, config=config, **settings)
        try:
            return calls.chain(run)
        except Exception as reason:
            # Such as one that wants more shared memory than there is.
            return str(reason).splitlines()[0]

    tried = others(calls.config)
    with ThreadPoolExecutor(THREADS) as pool:
        chains = list(pool.map(compiled, tried))
    found = []
    for config, chain in zip(tried, chains, strict=True):
        if isinstance(chain, str):
            print(f"    {config}: {chain}", flush=True)
        else:
            found.append({"config": described(config), "seconds": chain.seconds()})
    return sorted(found, key=lambda row: row["seconds"])


def main() -> int:
    """Check and time the cases that the arguments select."""
    results = Results.begin("expert_dispatch", "routed experts", seconds=SECONDS)
    assert results.copy is not None
    few = [name for name, spec in SPECS.items() if spec.tokens <= FEW_TOKENS]
    for name in results.selected(SWEPT if results.args.sweep else few):
        spec = SPECS[name]
        given = arguments(spec)
        row = check(spec, given, routings(spec, 1)[0])
        calls = Calls.in_turn(spec, given)
        row |= timed(calls, results.copy)
        if results.args.sweep:
            row["sweep"] = sweep(calls)
        results.add(name, row)
    return results.finish(_print_table)


def _print_table(figures: dict[str, dict[str, Any]]) -> None:
    names = ("error", "us", "of copy", "others")
    print(f"\n{'case':30} " + " ".join(f"{name:>8}" for name in names))
    for name, row in figures.items():
        cells = [f"{name:30} {row['error']:8.1e}", f"{row['seconds'] * 1e6:8.2f}"]
        cells.append(f"{row['of_copy']:8.1%}")
        cells += [
            f"{row[f'{name}_seconds'] * 1e6:8.1f} ({name})"
            for name in ("xla", "triton")
            if f"{name}_seconds" in row
        ]
        print(" ".join(cells) + ("" if row["right"] else "  WRONG"))
        for other in row.get("sweep", []):
            print(f"    {other['seconds'] * 1e6:8.2f} us  {other['config']}")


if __name__ == "__main__":
    sys.exit(main())
