"""The router on a GPU: first right, then fast.

    python benchmarks/kernels/router.py [--only PART_OF_A_NAME] [--sweep] [--output FILE]

Each case of `specs.SPECS` is run on random numbers: its logits are compared with the product in
float64, its ids and weights with the rule applied to those logits, and it must give the same bits
when run again. Then the cases in `TIMED` are timed, the kernels beside what XLA makes of the
reference, and up to 64 rows the two launches alone. Calls follow one another with other weights
each time, more than the L2 cache holds. "of copy" is the share of the bandwidth of a 4 GiB copy.
With `--sweep`, other ways to cut the product are timed too, on CUDA cores and on tensor cores, with
the second launch behind them and alone. Without `--output`, the JSON goes into the folder that $OUT
names, if it names one. Exits with 1 if a case is wrong.
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
import numpy as np

from benchmarks.kernels.results import Results
from benchmarks.kernels.router_cuts import SWEPT
from benchmarks.kernels.timing import Chain
from pallas_kernels._compat import current_target
from pallas_kernels.router import api, triton
from pallas_kernels.router.config import SOME_ROWS, Config, heuristic
from pallas_kernels.router.reference import RouterOutput
from pallas_kernels.router.specs import OPTIONS, PARTS, SPECS, Spec
from pallas_kernels.router.top_k import top_k

SECONDS = 300
# Options that have rows for each part.
ROWED = ("bias", "mask", "forced", "scale")
ROTATED_BYTES = 110e6
MOST_CALLS = 128
TIMED = (
    *(f"{rows} rows, 8 of 256" for rows in (4, 8, 16, 32, 64, 512, 8192)),
    *(f"1 row, {what}" for what in ("8 of 256", "10 of 512", "8 of 128", "4 of 60")),
    "1 row, 8 of 256, float32",
    "32 rows, 10 of 512",
    "8 rows, 8 of 256, all options",
)


@functools.partial(jax.jit, static_argnums=1)
def normal(key: jax.Array, shape: jax.ShapeDtypeStruct) -> jax.Array:
    """Random numbers of a shape and dtype."""
    return jax.random.normal(key, shape.shape, shape.dtype)


def arguments(spec: Spec, seed: int = 0) -> tuple[Any, ...]:
    """Random x, weight and options; temperatures are powers of two, so that nothing is rounded."""
    shapes = spec.arguments()
    keys = jax.random.split(jax.random.key(seed), 3)
    rng = np.random.default_rng(seed)
    drawn = {
        "bias": rng.standard_normal,
        "mask": lambda shape: rng.random(shape) < 0.9,
        "valid": lambda shape: rng.random(shape) < 0.9,
        "limit": lambda shape: rng.integers(0, spec.slots + 2, shape),
        "temperature": lambda shape: 2.0 ** rng.integers(-1, 2, shape),
        "forced": lambda shape: rng.random(shape) < 2 / spec.experts,
        "scale": rng.random,
        "part": lambda shape: np.full(shape, PARTS - 1),
    }
    weight = normal(keys[1], shapes[1]) * jnp.asarray(spec.width**-0.5, shapes[1].dtype)
    return (
        normal(keys[0], shapes[0]),
        weight,
        *(
            None if shape is None else jnp.asarray(drawn[name](shape.shape), shape.dtype)
            for name, shape in zip(OPTIONS, shapes[2:], strict=True)
        ),
    )


def choice(spec: Spec, logits: np.ndarray, options: dict[str, np.ndarray]) -> tuple[Any, Any]:
    """Ids and weights by the rule, in float64, for float32 logits."""
    score = logits + options.get("bias", np.float32(0))
    if "temperature" in options:
        score /= options["temperature"][:, None]
    may = options.get("mask", np.full((1, 1), True))
    score = np.where(may, score.astype(np.float64), -np.inf)
    first = np.where(options.get("forced", False) & may, np.inf, score)
    ids = np.argsort(-first, axis=1, kind="stable")[:, : spec.slots]
    filled = np.take_along_axis(first, ids, 1) > -np.inf
    if "limit" in options:
        filled &= np.arange(spec.slots) < options["limit"][:, None]
    if "valid" in options:
        filled &= options["valid"][:, None]
    order = np.argsort(-np.where(filled, np.take_along_axis(score, ids, 1), -np.inf), kind="stable")
    ids, filled = (np.take_along_axis(each, order, 1) for each in (ids, filled))
    p = np.exp(score - score.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    weights = np.where(filled, np.take_along_axis(p, ids, 1), 0)
    if spec.renormalise:
        weights /= np.maximum(weights.sum(axis=1, keepdims=True), 1e-300)
    if "scale" in options:
        weights *= np.take_along_axis(np.broadcast_to(options["scale"], score.shape), ids, 1)
    return np.where(filled, ids, spec.experts), weights


def check(spec: Spec) -> dict[str, Any]:
    """The errors, and whether they, the ids and the repeated bits are as they must be."""
    arrays = arguments(spec)
    run = jax.jit(functools.partial(api.OPERATION, implementation="triton", **spec.settings()))
    output, again = run(*arrays), run(*arrays)
    x, weight = (np.asarray(array, np.float64) for array in arrays[:2])
    logits = np.asarray(output.logits)
    options = dict(zip(OPTIONS, arrays[2:], strict=True))
    options = {name: np.asarray(array) for name, array in options.items() if array is not None}
    if "part" in options:
        mine = slice(spec.rows * (PARTS - 1), spec.rows * PARTS)
        options = {name: a[mine] if name in ROWED else a for name, a in options.items()}
    ids, weights = choice(spec, logits, options)
    exact = x @ weight.T
    row: dict[str, Any] = {
        "error": float(np.abs(logits - exact).max() / np.sqrt(np.mean(exact**2))),
        "bar": 1e-5,
        "weight_error": float(np.abs(np.asarray(output.weights) - weights).max()),
        "wrong_ids": int(np.sum(np.asarray(output.ids) != ids)),
        "repeats": all(map(jnp.array_equal, output, again)),
    }
    right = row["error"] <= row["bar"] and row["weight_error"] <= 1e-5 and not row["wrong_ids"]
    row["right"] = right and row["repeats"]
    return row


def measure(spec: Spec, run: Callable[..., RouterOutput | jax.Array]) -> float:
    """Seconds a call of `run`, which takes the arrays of a call of `spec`."""
    x, weight, *options = arguments(spec)
    count = max(1, min(MOST_CALLS, int(ROTATED_BYTES) // weight.nbytes))
    weights = [weight + jnp.asarray(index, weight.dtype) for index in range(count)]

    def call(x: jax.Array, weight: jax.Array) -> jax.Array:
        output = run(x, weight, *options)
        return output.weights if isinstance(output, RouterOutput) else output

    return Chain.of_equals(call, x, weights).seconds()


def timed(spec: Spec, copy: float) -> dict[str, Any]:
    """Times of the kernels and of XLA, and the bytes."""
    times: dict[str, Any] = {}
    for name, implementation in (("seconds", "triton"), ("xla_seconds", "reference")):
        run = functools.partial(api.OPERATION, implementation=implementation, **spec.settings())
        times[name] = measure(spec, run)
    config = None
    if spec.rows <= SOME_ROWS:
        config = heuristic(current_target().cores, *spec.arguments()[:2])
        times["logits_seconds"] = measure(spec, logits(config))
        times["config"] = described(config)
    times["top_k_seconds"] = choosing(spec, config)
    return times | {"of_copy": spec.bytes_moved / times["seconds"] / copy}


def described(config: Config) -> dict[str, Any]:
    """The fields of a configuration, and what it is."""
    return {"kind": type(config).__name__, **dataclasses.asdict(config)}


def logits(config: Config | None) -> Callable[..., jax.Array]:
    """The first launch alone."""
    return lambda x, weight, *_: triton.logits_in_parts(x, weight, config)


def choosing(spec: Spec, config: Config | None) -> float:
    """Seconds of the second launch alone, behind a first one that is cut so."""
    shape = jax.eval_shape(logits(config), *spec.arguments()[:2])
    parts = normal(jax.random.key(1), jax.ShapeDtypeStruct(shape.shape, shape.dtype))
    options = [arguments(spec)[2:]] * MOST_CALLS

    def call(parts: jax.Array, options: tuple[Any, ...]) -> jax.Array:
        return top_k(parts, *options, **spec.settings())[1]

    return Chain.of_equals(call, parts, options).seconds()


def sweep(spec: Spec, configs: Sequence[Config], until: float) -> list[dict[str, Any]]:
    """Times of the router with its product cut in other ways, the fastest first."""
    rows = []
    for config in configs:
        if time.monotonic() > until:
            break
        run = functools.partial(triton.router, config=config, **spec.settings())
        times = {"seconds": measure(spec, run), "logits_seconds": measure(spec, logits(config))}
        rows.append({**described(config), **times})
    return sorted(rows, key=lambda row: row["seconds"])


def main() -> int:
    """Check and time the cases that the arguments select."""
    results = Results.begin("router", "the router", seconds=SECONDS)
    for name in results.selected(SPECS):
        row = check(SPECS[name])
        if name in TIMED and results.copy is not None:
            row |= timed(SPECS[name], results.copy)
        if results.args.sweep and name in SWEPT:
            row["sweep"] = sweep(SPECS[name], SWEPT[name], results.until)
        results.add(name, row)
    return results.finish(_print_table)


def _print_table(figures: dict[str, dict[str, Any]]) -> None:
    titles = ("us", "XLA us", "logits", "top-k")
    print(f"\n{'case':32} {'error':>8} {'bar':>8} " + " ".join(f"{title:>8}" for title in titles))
    for name, row in figures.items():
        cells = [f"{name:32} {row['error']:8.1e} {row['bar']:8.1e}"]
        for key in ("seconds", "xla_seconds", "logits_seconds", "top_k_seconds"):
            cells.append(f"{row[key] * 1e6:8.2f}" if key in row else " " * 8)
        print(" ".join(cells) + ("" if row["right"] else "  WRONG"))
        for other in row.get("sweep", []):
            fields = {key: value for key, value in other.items() if "seconds" not in key}
            times = f"{other['seconds'] * 1e6:8.2f} {other['logits_seconds'] * 1e6:8.2f}"
            print(f"    {times}  " + "  ".join(f"{key} {value}" for key, value in fields.items()))


if __name__ == "__main__":
    sys.exit(main())
