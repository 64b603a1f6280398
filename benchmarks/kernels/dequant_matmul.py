"""Products with codes on a GPU: first right, then fast.

    python benchmarks/kernels/dequant_matmul.py [--only PART_OF_A_NAME] [--sweep] [--output FILE]

Each case of `specs.SPECS` is compared with float64 products of the exact numbers that the codes
stand for, and must give the same bits when run again. Then it is timed beside XLA's product with
the same matrix in bfloat16, and from 5 rows on beside XLA's product with a matrix that is made of
the codes in the same call. Matrices are rotated over more than 220 MB, and the
time of making a call wait for the one before is taken off. "of copy" is the share of
the bandwidth of a 4 GiB copy that the bytes of the call make. With `--sweep`, other ways to cut the
work are timed too. Without `--output`, the JSON goes into the folder that $OUT names, if it names
one. Exits with 1 if a case is wrong.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import jax
import jax.numpy as jnp

from benchmarks.kernels.results import Results
from benchmarks.kernels.timing import seconds_per_call
from pallas_kernels._compat import current_target
from pallas_kernels.dequant_matmul import api, layout, triton
from pallas_kernels.dequant_matmul.config import Config, FewRows, ManyRows, SomeRows, heuristic
from pallas_kernels.dequant_matmul.specs import SPECS, Spec

SECONDS = 75
ROTATED_BYTES = 220e6
MOST_TURNS = 64
CHECKED_OUTPUTS = 4096
FEW = [
    *(FewRows(outputs, 64, warps) for outputs in (4, 8, 16, 32) for warps in (4, 8)),
    FewRows(8, 64, 2),
    FewRows(8, 32, 2),
    FewRows(16, 32, 2),
    FewRows(16, 32, 4),
    FewRows(8, 16, 1),
    FewRows(8, 128, 8),
]
SOME = [
    SomeRows(16, outputs, splits, warps, stages)
    for outputs, warps in ((32, 1), (32, 2), (64, 2), (64, 4), (128, 4), (128, 8))
    for splits in (1, 4)
    for stages in (1, 3)
]
MANY = [
    ManyRows(128, 128, 2, 8, 2),
    ManyRows(128, 128, 4, 8, 2),
    ManyRows(128, 128, 4, 8, 3),
    ManyRows(256, 64, 2, 8, 3),
    ManyRows(256, 128, 2, 8, 3),
    ManyRows(128, 256, 2, 8, 3),
    ManyRows(128, 128, 2, 4, 3),
]
SWEPT = (
    "1 row, 12288x2048",
    "1 row, 2048x4096",
    "1 row, head, 4 bits",
    "16 rows, 12288x2048",
    "64 rows, 12288x2048",
    "4096 rows, 12288x2048",
)
Arrays = tuple[Any, ...]


def arguments(spec: Spec, seed: int = 0) -> Arrays:
    """Random x, codes, scale and zero."""
    x, codes, scale, zero = spec.arguments()

    @jax.jit
    def draw(key: jax.Array) -> Arrays:
        keys = jax.random.split(key, 4)
        scales = jax.random.uniform(keys[2], scale.shape, scale.dtype, 0.1, 1) / spec.inputs**0.5
        zeros = None
        if zero is not None:
            zeros = jax.random.uniform(keys[3], zero.shape, zero.dtype, 0, 2**spec.bits)
        return (
            jax.random.normal(keys[0], x.shape, x.dtype),
            jax.random.bits(keys[1], codes.shape, jnp.uint32),
            scales,
            zeros,
        )

    return draw(jax.random.key(seed))


@functools.partial(jax.jit, static_argnames="spec")
def error(spec: Spec, arrays: Arrays, result: jax.Array) -> jax.Array:
    """Norm of the difference from float64 over the norm of the product, over some of the outputs.

    Scales with signed codes are exact in float64, so the numbers are made of the parts here.
    """
    step = max(1, spec.outputs // CHECKED_OUTPUTS)
    x, codes, scale, zero = arrays
    values = layout.unpack(codes[::step], spec.inputs).astype(jnp.float64)

    def wide(x: jax.Array) -> jax.Array:
        x = jnp.repeat(x[::step].astype(jnp.float64), spec.group_size, axis=1)
        return x[:, : spec.inputs]

    weight = (values - (layout.CENTRES[spec.bits] if zero is None else wide(zero))) * wide(scale)
    rows = jnp.arange(0, spec.rows, max(1, spec.rows // 64))
    expected = x[rows].astype(jnp.float64) @ weight.T
    difference = result[rows, ::step].astype(jnp.float64) - expected
    return jnp.linalg.norm(difference) / jnp.linalg.norm(expected)


def check(spec: Spec) -> dict[str, Any]:
    """The error with a float32 result, and whether it and the repeated bits are as they must be."""
    spec = dataclasses.replace(spec, result="float32")
    arrays = arguments(spec)
    run = functools.partial(api.OPERATION, implementation="triton", **spec.settings())
    y, again = run(*arrays), run(*arrays)
    with jax.enable_x64(True):
        found = float(error(spec, arrays, y))
    row: dict[str, Any] = {"error": found, "bar": 1e-3 if spec.rows <= 64 else 3e-3}
    row["repeats"] = bool(jnp.array_equal(y, again))
    row["right"] = found <= row["bar"] and row["repeats"]
    return row


def chained(run: Callable[..., jax.Array]) -> Callable[[jax.Array, Any, Any], jax.Array]:
    """A call whose x waits for the call before: XLA leaves out what nobody reads."""

    def call(x: jax.Array, weight: Any, _: Any) -> jax.Array:
        y = jax.lax.optimization_barrier(run(x, *weight))
        return x.at[0, 0].add(0 * y[0, 0].astype(x.dtype))

    return call


def measure(run: Callable[..., jax.Array], x: jax.Array, weights: Sequence[Any]) -> float:
    """Seconds a call of `run`, which takes x and the arrays of a matrix, less those of waiting."""
    calls = 8 if x.shape[0] > 64 else 64
    waiting = seconds_per_call(chained(lambda x, *_: x), x, [()], None, calls=calls)
    return seconds_per_call(chained(run), x, weights, None, calls=calls) - waiting


def turns(nbytes: int) -> int:
    """How many matrices are rotated."""
    return max(2, min(MOST_TURNS, int(ROTATED_BYTES) // nbytes + 1))


def coded(spec: Spec) -> tuple[jax.Array, list[Arrays]]:
    """X, and matrices in codes."""
    drawn = [arguments(spec, seed) for seed in range(turns(spec.weight_bytes))]
    return drawn[0][0], [arrays[1:] for arrays in drawn]


def timed(spec: Spec, copy: float) -> dict[str, float]:
    """Times of the kernel and of XLA, and the bytes."""
    x, weights = coded(spec)
    settings = spec.settings()
    run = functools.partial(api.OPERATION, implementation="triton", **settings)
    row = {"seconds": measure(run, x, weights)}
    row["of_copy"] = spec.nbytes / row["seconds"] / copy

    def plain(x: jax.Array, weight: jax.Array) -> jax.Array:
        return jnp.einsum("mi,oi->mo", x, weight, preferred_element_type=settings["dtype"])

    def made(x: jax.Array, codes: Any, scale: Any, zero: Any) -> jax.Array:
        weight = layout.dequantise(codes, scale, zero, spec.inputs, spec.group_size)
        return plain(x, weight.astype(jnp.bfloat16))

    if spec.rows > 4:
        row["made_seconds"] = measure(made, x, weights[:4])
    shape = spec.outputs, spec.inputs
    count = turns(2 * spec.outputs * spec.inputs)
    wide = [(jax.random.normal(jax.random.key(i), shape, jnp.bfloat16),) for i in range(count)]
    row["xla_seconds"] = measure(plain, x, wide)
    return row


def sweep(spec: Spec, until: float) -> list[dict[str, Any]]:
    """Times of other configurations, the fastest first."""
    cuts: Sequence[Config] = FEW if spec.rows <= 4 else SOME if spec.rows <= 64 else MANY
    (x, weights), rows = coded(spec), []
    for config in cuts:
        if time.monotonic() > until:
            break
        if isinstance(config, SomeRows):
            config = dataclasses.replace(config, rows=max(16, spec.rows))
        run = functools.partial(triton.dequant_matmul, config=config, **spec.settings())
        try:
            seconds = measure(run, x, weights)
        except Exception as reason:
            # Such as one that wants more shared memory than there is.
            print(f"    {config}: {str(reason).splitlines()[0]}", flush=True)
            continue
        rows.append({**dataclasses.asdict(config), "seconds": seconds})
    return sorted(rows, key=lambda row: row["seconds"])


def main() -> int:
    """Check and time the cases that the arguments select."""
    results = Results.begin("dequant_matmul", "products with codes", seconds=SECONDS)
    assert results.copy is not None
    for name in results.selected(SPECS):
        spec = SPECS[name]
        row = check(spec)
        row |= timed(spec, results.copy)
        sizes = layout.unit_count(spec.inputs), spec.group_size // layout.UNIT
        cut = heuristic(current_target().cores, spec.rows, spec.outputs, *sizes)
        row["config"] = dataclasses.asdict(cut)
        if results.args.sweep and name in SWEPT:
            row["sweep"] = sweep(spec, results.until)
        results.add(name, row)
    return results.finish(_print_table)


def _print_table(figures: dict[str, dict[str, Any]]) -> None:
    names = ("error", "bar", "us", "of copy", "XLA us", "made us")
    print(f"\n{'case':40} " + " ".join(f"{name:>8}" for name in names))
    for name, row in figures.items():
        cells = [f"{name:40} {row['error']:8.1e} {row['bar']:8.1e} {row['seconds'] * 1e6:8.2f}"]
        cells.append(f"{row['of_copy']:8.1%} {row['xla_seconds'] * 1e6:8.2f}")
        if "made_seconds" in row:
            cells.append(f"{row['made_seconds'] * 1e6:8.2f}")
        print(" ".join(cells) + ("" if row["right"] else "  WRONG"))
        for other in row.get("sweep", []):
            cut = "  ".join(f"{key} {value}" for key, value in other.items() if key != "seconds")
            print(f"    {other['seconds'] * 1e6:8.2f}  {cut}")


if __name__ == "__main__":
    sys.exit(main())
