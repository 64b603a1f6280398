"""Products with codes on a GPU: first right, then fast.

    python benchmarks/kernels/dequant_matmul.py [--only PART_OF_A_NAME] [--sweep] [--output FILE]

Each case of `specs.SPECS` is compared with float64 products of the exact numbers that the codes
stand for, and must give the same bits when run again. Then it is timed beside XLA's product with
the same matrices in bfloat16; from 65 rows on beside XLA's product with a matrix that is made of
the codes in the same call; and with several matrices beside a call for each. Matrices are rotated
over more than 200 MB. "of copy" is the share of the bandwidth of a 4 GiB copy that the bytes of the
call make. With `--sweep`, other ways to cut the work are timed too, of fewer cases. Without
`--output`, the JSON goes into the folder that $OUT names, if it names one. Exits with 1 if a case
is wrong.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import jax
import jax.numpy as jnp

from benchmarks.kernels.results import Results
from benchmarks.kernels.timing import Chain
from pallas_kernels._compat import current_target
from pallas_kernels.dequant_matmul import api, layout, triton
from pallas_kernels.dequant_matmul.config import (
    Config,
    FewRows,
    ManyRows,
    SomeRows,
    Unpacked,
    heuristic,
)
from pallas_kernels.dequant_matmul.pieces import Piece
from pallas_kernels.dequant_matmul.qtensor import QTensor
from pallas_kernels.dequant_matmul.specs import SPECS, Spec

SECONDS = 110
ROTATED_BYTES = 220e6
MOST_TURNS = 64
CALLS, MANY_CALLS = 64, 8
THREADS = 8
CHECKED_OUTPUTS = 4096
FEW = [
    *(FewRows(outputs, 128, 4) for outputs in (4, 8)),
    FewRows(4, 64, 2, awaited=False),
    *(FewRows(outputs, 64, 2) for outputs in (4, 8, 16)),
    FewRows(8, 64, 4),
    FewRows(8, 32, 1),
    FewRows(8, 16, 1),
]
SOME = [
    *(SomeRows(16, 32, splits, blocks=blocks) for splits in (1, 2, 4) for blocks in (1, 2)),
    *(SomeRows(16, 32, num_stages=stages, blocks=2) for stages in (2, 4)),
    SomeRows(16, 16, num_warps=1, blocks=2),
    SomeRows(16, 64, blocks=1),
]
MANY = [
    ManyRows(),
    ManyRows(128, 128, 4, 8, 3),
    ManyRows(256, 128, 2, 8, 3),
    ManyRows(128, 256, 2, 8, 3),
    Unpacked(16, 16, 4),
    Unpacked(32, 16, 4),
    Unpacked(8, 64, 8),
    Unpacked(16, 64, 8),
]
SWEPT = (
    "16 rows, 12288x2048",
    "1 row, 12288x2048",
    "4 rows, 12288x2048",
    "64 rows, 12288x2048",
    "16 rows, 12288x2048, groups of 64",
    "2 rows, 12288x2048",
    "1 row, 2048x4096",
    "1 row, head, 4 bits",
    "1 row, 8192x512",
    "1 row, delta net",
    "1 row, attention",
    "1 row, shared expert",
    "256 rows, 12288x2048",
    "4096 rows, 12288x2048",
)
Weights = tuple[QTensor | jax.Array, ...]


@functools.partial(jax.jit, static_argnames="spec")
def arguments(spec: Spec, seed: int = 0) -> tuple[jax.Array, Weights]:
    """Random x and matrices."""
    x, weights = spec.arguments()
    keys = jax.random.split(jax.random.key(seed), 1 + len(weights))
    drawn = [
        _drawn(weight, matrix.bits, key)
        for weight, matrix, key in zip(weights, spec.matrices, keys[1:], strict=True)
    ]
    return jax.random.normal(keys[0], x.shape, x.dtype), tuple(drawn)


def _drawn(like: Any, bits: int, key: jax.Array) -> QTensor | jax.Array:
    if not isinstance(like, QTensor):
        return jax.random.normal(key, like.shape, like.dtype)
    keys, zero = jax.random.split(key, 3), None
    if like.zero is not None:
        zero = jax.random.uniform(keys[2], like.zero.shape, like.zero.dtype, 0, 2**bits)
    scale = jax.random.uniform(keys[1], like.scale.shape, like.scale.dtype, 0.1, 1)
    codes = jax.random.bits(keys[0], like.codes.shape, jnp.uint32)
    scale = scale / like.inputs**0.5
    return dataclasses.replace(like, codes=codes, scale=scale, zero=zero)


@functools.partial(jax.jit, static_argnames=("outputs", "inputs"))
def plain_matrix(outputs: int, inputs: int, seed: int) -> jax.Array:
    """A random matrix in bfloat16."""
    return jax.random.normal(jax.random.key(seed), (outputs, inputs), jnp.bfloat16)


@functools.partial(jax.jit, static_argnames="spec")
def error(spec: Spec, x: jax.Array, weight: QTensor | jax.Array, result: jax.Array) -> jax.Array:
    """Norm of the difference from float64 over the norm of the product, over some of the outputs.

    Scales with signed codes are exact in float64, so the numbers are made of the parts here.
    """
    step = max(1, weight.shape[0] // CHECKED_OUTPUTS)
    coded = isinstance(weight, QTensor)
    numbers = _numbers(weight, step) if coded else weight[::step].astype(jnp.float64)
    rows = jnp.arange(0, spec.rows, max(1, spec.rows // 64))
    expected = x[rows].astype(jnp.float64) @ numbers.T
    difference = result[rows, ::step].astype(jnp.float64) - expected
    return jnp.linalg.norm(difference) / jnp.linalg.norm(expected)


def _numbers(weight: QTensor, step: int) -> jax.Array:
    """Those of every so many outputs, in float64."""
    values = layout.unpack(weight.codes[::step], weight.inputs).astype(jnp.float64)

    def wide(x: jax.Array) -> jax.Array:
        x = jnp.repeat(x[::step].astype(jnp.float64), weight.group_size, axis=1)
        return x[:, : weight.inputs]

    zero = layout.CENTRES[weight.bits] if weight.zero is None else wide(weight.zero)
    return (values - zero) * wide(weight.scale)


def check(spec: Spec) -> dict[str, Any]:
    """The error with a float32 result, and whether it and the repeated bits are as they must be."""
    spec = dataclasses.replace(spec, result="float32")
    x, weights = arguments(spec)
    run = functools.partial(api.OPERATION, implementation="triton", **spec.settings())
    ys, again = run(x, weights), run(x, weights)
    with jax.enable_x64(True):
        found = max(float(error(spec, x, weight, y)) for weight, y in zip(weights, ys, strict=True))
    row: dict[str, Any] = {"error": found, "bar": 1e-3 if spec.rows <= 64 else 3e-3}
    row["repeats"] = all(bool(jnp.array_equal(y, z)) for y, z in zip(ys, again, strict=True))
    row["right"] = found <= row["bar"] and row["repeats"]
    return row


def chain(
    run: Callable[[jax.Array, Weights], Any], x: jax.Array, weights: Sequence[Weights]
) -> Chain:
    """Calls of `run` with matrices taken in turn."""
    return Chain.of_equals(run, x, weights, MANY_CALLS if len(x) > 64 else CALLS)


def turns(nbytes: int) -> int:
    """How many times the matrices of a call are held, to be rotated."""
    return max(2, min(MOST_TURNS, int(ROTATED_BYTES) // nbytes + 1))


def coded(spec: Spec) -> tuple[jax.Array, list[Weights]]:
    """X, and matrices in codes."""
    drawn = [arguments(spec, seed) for seed in range(turns(spec.weight_bytes))]
    return drawn[0][0], [weights for _, weights in drawn]


def timed(spec: Spec, copy: float) -> dict[str, Any]:
    """Times of the kernel and of XLA, and the bytes."""
    x, weights = coded(spec)
    settings = spec.settings()
    run = functools.partial(api.OPERATION, implementation="triton", **settings)

    def apart(x: jax.Array, weights: Weights) -> list[jax.Array]:
        return [run(x, (weight,))[0] for weight in weights]

    def plain(x: jax.Array, weights: Weights) -> list[jax.Array]:
        dtype = settings["dtype"]
        return [jnp.einsum("mi,oi->mo", x, w, preferred_element_type=dtype) for w in weights]

    def made(x: jax.Array, weights: Weights) -> list[jax.Array]:
        return plain(x, tuple(weight.dequantise(jnp.bfloat16) for weight in weights))

    sizes = [matrix.outputs for matrix in spec.matrices]
    wide = [
        tuple(plain_matrix(size, spec.inputs, seed) for size in sizes)
        for seed in range(turns(2 * spec.outputs * spec.inputs))
    ]
    chains = {"seconds": chain(run, x, weights), "xla_seconds": chain(plain, x, wide)}
    if len(sizes) > 1:
        chains["apart_seconds"] = chain(apart, x, weights)
    if spec.rows > 64:
        chains["made_seconds"] = chain(made, x, weights[:2])
    row: dict[str, Any] = {name: chain.seconds() for name, chain in chains.items()}
    return row | {"of_copy": spec.nbytes / row["seconds"] / copy}


def sweep(spec: Spec) -> list[dict[str, Any]]:
    """Times of other configurations, the fastest first."""
    cuts: Sequence[Config] = SOME if spec.rows <= 64 else MANY
    if spec.rows <= 4:
        widest = 2 * layout.unit_count(spec.inputs)
        cuts = [cut for cut in FEW if cut.units < widest and cut.outputs <= (16, 8)[spec.rows > 1]]
        if spec.outputs == 12288:
            cuts += SOME[:4] if spec.rows == 1 else SOME
    (x, weights), rows = coded(spec), []

    def compiled(config: Config) -> Chain | str:
        if isinstance(config, SomeRows):
            config = dataclasses.replace(config, rows=max(16, spec.rows))
        run = functools.partial(triton.dequant_matmul, config=config, **spec.settings())
        try:
            return chain(run, x, weights)
        except Exception as reason:
            # Such as one that wants more shared memory than there is.
            return str(reason).splitlines()[0]

    with ThreadPoolExecutor(THREADS) as pool:
        chains = list(pool.map(compiled, cuts))
    for config, found in zip(cuts, chains, strict=True):
        cut = {"kind": type(config).__name__, **dataclasses.asdict(config)}
        if isinstance(found, str):
            print(f"    {config}: {found}", flush=True)
            continue
        rows.append({**cut, "seconds": found.seconds()})
    return sorted(rows, key=lambda row: row["seconds"])


def main() -> int:
    """Check and time the cases that the arguments select."""
    results = Results.begin("dequant_matmul", "products with codes", seconds=SECONDS)
    assert results.copy is not None
    for name in results.selected(SWEPT if results.args.sweep else SPECS):
        spec = SPECS[name]
        row = check(spec)
        row |= timed(spec, results.copy)
        piece = Piece.of(arguments(spec)[1][0], spec.rows, spec.result)
        beside = any(not matrix.coded for matrix in spec.matrices)
        cut = heuristic(current_target().cores, piece.shape, spec.outputs, beside=beside)
        row["config"] = dataclasses.asdict(cut)
        if results.args.sweep:
            row["sweep"] = sweep(spec)
        results.add(name, row)
    return results.finish(_print_table)


def _print_table(figures: dict[str, dict[str, Any]]) -> None:
    names = ("error", "bar", "us", "of copy", "XLA us", "made us", "apart us")
    print(f"\n{'case':40} " + " ".join(f"{name:>8}" for name in names))
    for name, row in figures.items():
        cells = [f"{name:40} {row['error']:8.1e} {row['bar']:8.1e} {row['seconds'] * 1e6:8.2f}"]
        cells.append(f"{row['of_copy']:8.1%} {row['xla_seconds'] * 1e6:8.2f}")
        for beside in ("made_seconds", "apart_seconds"):
            cells.append(f"{row[beside] * 1e6:8.2f}" if beside in row else " " * 8)
        print(" ".join(cells) + ("" if row["right"] else "  WRONG"))
        for other in row.get("sweep", []):
            cut = "  ".join(f"{key} {value}" for key, value in other.items() if key != "seconds")
            print(f"    {other['seconds'] * 1e6:8.2f}  {cut}")


if __name__ == "__main__":
    sys.exit(main())
