"""The norms on a GPU: first right, then fast.

    python benchmarks/kernels/rms_norm.py [--only PART_OF_A_NAME] [--sweep] [--output FILE]

Each case of `specs.SPECS` is compared with the formula in float64 and must give the same bits when
run again. Then the cases in `TIMED` are timed, the kernel beside what XLA makes of the reference.
Calls are chained: the norm is what the next call normalises, and after an addition what it adds.
For that the result has x's dtype, or y's where one is added. "of copy" is the share of the
bandwidth of a 4 GiB copy; what fits the L2 cache may exceed it. With `--sweep`, other ways to cut
the work are timed too. Without `--output`, the JSON goes into the folder that $OUT names, if it
names one. Exits with 1 if a case is wrong.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import jax
import jax.numpy as jnp

from benchmarks.kernels.results import Results
from benchmarks.kernels.timing import seconds_per_call
from pallas_kernels._compat import current_target
from pallas_kernels.rms_norm import api, triton
from pallas_kernels.rms_norm.config import Config, config_for
from pallas_kernels.rms_norm.specs import SPECS, Spec

SECONDS = 75
ROTATED_BYTES = 220e6
TIMED = (
    *(f"{form}{rows} rows" for form in ("", "add, ") for rows in (8, 64, 8192)),
    "1 row",
    "add, 1 row",
    *(f"gated, {tokens}" for tokens in ("1 token", "8 tokens", "64 tokens", "8192 tokens")),
    "100000 rows of 2560",
)
WIDE = [(1, 4), (1, 8), (1, 16), (1, 32)]
HEADS = [(1, 1), (2, 1), (4, 1), (4, 2), (8, 2), (8, 4), (16, 4), (16, 8), (32, 8)]
SWEPT = {
    "1 row": WIDE,
    "add, 1 row": WIDE,
    "add, 64 rows": WIDE,
    "add, 8192 rows": WIDE,
    "gated, 1 token": HEADS[:5],
    "gated, 64 tokens": HEADS,
    "gated, 8192 tokens": HEADS,
}

Run = Callable[..., tuple[jax.Array, jax.Array | None]]


def arguments(spec: Spec, seed: int = 0) -> tuple[jax.Array | None, ...]:
    """Random x, weight, y and gate."""

    @functools.partial(jax.jit, static_argnums=1)
    def draw(key: jax.Array, shape: jax.ShapeDtypeStruct) -> jax.Array:
        return jax.random.normal(key, shape.shape, shape.dtype)

    keys = jax.random.split(jax.random.key(seed), 4)
    shapes = spec.arguments()
    return tuple(None if s is None else draw(k, s) for k, s in zip(keys, shapes, strict=True))


@functools.partial(jax.jit, static_argnames="spec")
def errors(spec: Spec, arrays: tuple[Any, ...], results: tuple[Any, ...]) -> dict[str, jax.Array]:
    """Greatest errors over the root mean square, against float64; and of rounding alone."""
    x, weight, y, gate = (None if a is None else a.astype(jnp.float64) for a in arrays)

    def rounded(value: jax.Array, dtype: str) -> jax.Array:
        """Unlike a conversion there and back, the compiler keeps this."""
        kind = jnp.finfo(dtype)
        return jax.lax.reduce_precision(value, kind.nexp, kind.nmant)

    total = x if y is None else rounded(x + rounded(y, spec.dtype), spec.dtype)
    normal = total / jnp.sqrt(jnp.mean(total**2, axis=-1, keepdims=True) + spec.settings()["eps"])
    normal = normal * ((1 if spec.zero_centred else 0) + weight)
    if gate is not None:
        normal = normal * gate / (1 + jnp.exp(-gate))

    def error(value: jax.Array, expected: jax.Array) -> jax.Array:
        difference = jnp.max(jnp.abs(value.astype(jnp.float64) - expected))
        return difference / jnp.sqrt(jnp.mean(expected**2))

    rounding = error(rounded(normal, spec.result), normal)
    out = {"error": error(results[0], normal), "rounding": rounding}
    if y is not None:
        out["sum_error"] = error(results[1], total)
    return out


def check(spec: Spec) -> dict[str, Any]:
    """The errors, and whether they and the repeated bits are as they must be."""
    arrays = arguments(spec)
    run = jax.jit(functools.partial(api.OPERATION, implementation="triton", **spec.settings()))
    results, again = run(*arrays), run(*arrays)
    with jax.enable_x64(True):
        row: dict[str, Any] = jax.tree.map(float, errors(spec, arrays, tuple(results)))
    roundings = 2 if spec.gated else 1
    row["bar"] = 1e-5 if spec.result == "float32" else 1e-2 + roundings * row["rounding"]
    row["repeats"] = all(
        bool(jnp.array_equal(one, two))
        for one, two in zip(jax.tree.leaves(results), jax.tree.leaves(again), strict=True)
    )
    right = row["error"] <= row["bar"] and row.get("sum_error", 0) <= 1e-6
    row["right"] = right and row["repeats"]
    return row


def chained(spec: Spec) -> Spec:
    """The case with a result that the next call takes."""
    return dataclasses.replace(spec, result=spec.added or spec.dtype)


def measure(spec: Spec, run: Run) -> float:
    """Seconds a call of `run`, which takes the arrays of a call of `spec`, chained."""
    x, weight, y, gate = arguments(spec)
    gates: list[Any] = [gate]
    if gate is not None:
        turns = max(1, min(64, int(ROTATED_BYTES) // gate.nbytes))
        gates = [arguments(spec, seed)[3] for seed in range(turns)]

    def call(carry: Any, gate: Any, weight: jax.Array) -> Any:
        # Without this, XLA would join parts of one call with parts of the next.
        x, y = jax.lax.optimization_barrier(carry)
        normal, total = run(x, weight, y, gate)
        return (normal, None) if total is None else (total, normal)

    return seconds_per_call(call, (x, y), gates, weight)


def timed(spec: Spec, copy: float) -> dict[str, float]:
    """Times of the kernel and of XLA, and the bytes."""
    spec, times = chained(spec), {}
    for name, implementation in (("seconds", "triton"), ("xla_seconds", "reference")):
        run = functools.partial(api.OPERATION, implementation=implementation, **spec.settings())
        times[name] = measure(spec, run)
    return times | {"of_copy": spec.bytes_moved / times["seconds"] / copy}


def sweep(spec: Spec, cuts: list[tuple[int, int]], until: float) -> list[dict[str, Any]]:
    """Times of other configurations, the fastest first."""
    spec, rows = chained(spec), []
    for cut in cuts:
        if time.monotonic() > until:
            break
        config = Config(*cut)
        run = functools.partial(triton.rms_norm, config=config, **spec.settings())
        rows.append({**dataclasses.asdict(config), "seconds": measure(spec, run)})
    return sorted(rows, key=lambda row: row["seconds"])


def main() -> int:
    """Check and time the cases that the arguments select."""
    results = Results.begin("rms_norm", "the norms", seconds=SECONDS)
    for name in results.selected(SPECS):
        row = check(SPECS[name])
        if name in TIMED:
            row |= timed(SPECS[name], results.copy)
            cut = config_for(current_target(), SPECS[name].arguments()[0])
            row["config"] = dataclasses.asdict(cut)
        if results.args.sweep and name in SWEPT:
            row["sweep"] = sweep(SPECS[name], SWEPT[name], results.until)
        results.add(name, row)
    return results.finish(_print_table)


def _print_table(figures: dict[str, dict[str, Any]]) -> None:
    print(f"\n{'case':32} {'error':>8} {'bar':>8} {'us':>8} {'XLA us':>8} {'of copy':>8}")
    for name, row in figures.items():
        cells = [f"{name:32} {row['error']:8.1e} {row['bar']:8.1e}"]
        if "seconds" in row:
            cells += [f"{row[key] * 1e6:8.2f}" for key in ("seconds", "xla_seconds")]
            cells.append(f"{row['of_copy']:8.1%}")
        print(" ".join(cells) + ("" if row["right"] else "  WRONG"))
        for other in row.get("sweep", []):
            cut = "  ".join(f"{key} {value}" for key, value in other.items() if key != "seconds")
            print(f"    {other['seconds'] * 1e6:8.2f}  {cut}")


if __name__ == "__main__":
    sys.exit(main())
