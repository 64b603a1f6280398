"""`attention_inputs` on a GPU: first right, then fast.

    python benchmarks/kernels/attention_inputs.py [--only PART_OF_A_NAME] [--sweep] [--output FILE]

Each case is compared with norm and rotation in float64 on the host: queries, and keys and values
where the table says that they lie, out of blocks in random order; all other rows must keep their
bits, and the bits must repeat. Then it is timed, and beside it the reference as XLA compiles it.
Calls are chained by the pools that they write in place, and take inputs in turn: more than 200 MB,
or 64 of them. "of copy" is the share of the bandwidth of a 4 GiB copy that the bytes read and
written make. With `--sweep`, other ways to cut the work are timed too. Without `--output`,
the JSON goes into the folder that $OUT names, if it names one. Exits with 1 if a case is wrong.
"""

from __future__ import annotations

import functools
import itertools
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels.results import Results
from benchmarks.kernels.timing import CALLS_A_STEP, seconds_per_call
from pallas_kernels.attention_inputs import attention_inputs, triton
from pallas_kernels.attention_inputs.config import Config, heuristic
from pallas_kernels.attention_inputs.specs import SPECS, Spec
from pallas_kernels.testing import relative_error

ROTATED_BYTES = 220e6
MOST_TURNS = 64
REPEATS = 20
SECONDS = 70
BARS = {"bfloat16": 1e-2, "float32": 1e-5}
HALF_A_STEP = 0.51  # of a scale: what rounding to codes may cost


def arguments(spec: Spec) -> list[Any]:
    """The call's arrays: each sequence's tokens up to the end of its table, -77 where none is."""
    rng = np.random.default_rng(0)
    keys = iter(jax.random.split(jax.random.key(0), 32))

    def drawn(shape: jax.ShapeDtypeStruct) -> jax.Array:
        return jax.random.normal(next(keys), shape.shape).astype(shape.dtype)

    arrays: list[Any] = [None if x is None else jax.tree.map(drawn, x) for x in spec.arguments()]
    room = spec.columns * spec.block_size
    positions = room - spec.new_tokens + np.arange(spec.new_tokens, dtype=np.int32)
    positions = np.tile(positions, (spec.batch, 1))
    angles = positions[..., None] * 1e4 ** -np.linspace(0, 1, spec.rotated // 2)
    arrays[3:5] = (jnp.asarray(f(angles), jnp.float32) for f in (np.cos, np.sin))
    if spec.cache != "none":
        shapes = spec.arguments()
        arrays[7:9] = (jnp.full(x.shape, -77, x.dtype) for x in shapes[7:9])
        table = 1 + rng.permutation(spec.batch * spec.columns).astype(np.int32)
        arrays[9] = jnp.asarray(table.reshape(spec.batch, spec.columns))
        arrays[10] = jnp.asarray(positions)
    return arrays


def turned(spec: Spec, x: np.ndarray, weight: Any, tables: list[np.ndarray]) -> np.ndarray:
    """Norm and rotation of heads [B, T, n, H] in float64."""
    wide = x.astype(np.float64)
    if weight is not None:
        scale = np.asarray(weight).astype(np.float64) + (spec.norm == "zero-centred")
        wide /= np.sqrt((wide**2).mean(-1, keepdims=True) + spec.settings()["eps"])
        wide *= scale
    half = spec.rotated // 2
    cos, sin = (table[:, :, None].astype(np.float64) for table in tables)
    first, second = wide[..., :half].copy(), wide[..., half : 2 * half].copy()
    wide[..., :half] = first * cos - second * sin
    wide[..., half : 2 * half] = second * cos + first * sin
    return wide


def check(spec: Spec, arrays: list[Any], run: Any) -> dict[str, Any]:
    """Greatest errors, and whether nothing else was written and the bits repeat."""
    compiled = jax.jit(run)
    first = jax.device_get(compiled(*arrays))
    repeats = all(_same(first, jax.device_get(compiled(*arrays))) for _ in range(REPEATS))
    q, k, v, *tables = (np.asarray(x) for x in arrays[:5])
    expected = turned(spec, k, arrays[6], tables)
    pairs = [(first.q, turned(spec, q[..., : spec.width], arrays[5], tables))]
    kept, errors = True, []
    if spec.cache == "none":
        pairs += [(first.key, expected), (first.value, v * 1.0)]
    else:
        places = _places(spec, *(np.asarray(x) for x in arrays[9:11]))
        free = np.ones(first.key.shape[:3], bool)
        free[places[0], :, places[2]] = False
        kept = all((pool[free] == -77).all() for pool in (first.key, first.value))
        if spec.cache == "int8":
            errors = _errors_of_codes(spec, first, places, (expected, v), arrays)
        else:
            pairs += [(first.key[places], expected), (first.value[places], v * 1.0)]
    found = [(relative_error(x, exact), _rounding(spec, exact)) for x, exact in pairs]
    found += [(error, 0.0) for error in errors]
    error, rounding = max(found, key=lambda pair: pair[0] - pair[1])
    bar = BARS[spec.dtype] + rounding
    return {
        "error": error,
        "bar": bar,
        "others_kept": bool(kept),
        "repeats": bool(repeats),
        "right": bool(error <= bar and kept and repeats),
    }


def _rounding(spec: Spec, expected: np.ndarray) -> float:
    """What rounding the result alone costs, which comes on top."""
    return relative_error(expected.astype(jnp.dtype(spec.dtype)), expected)


def _places(spec: Spec, table: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, ...]:
    """Block, head and row of each token and head, [B, T, K] or what broadcasts to it."""
    columns, rows = np.divmod(positions, spec.block_size)
    blocks = np.take_along_axis(table, columns, axis=1)
    return blocks[..., None], np.arange(spec.kv_heads), rows[..., None]


def _errors_of_codes(
    spec: Spec, found: Any, places: tuple[np.ndarray, ...], wanted: Any, arrays: list[Any]
) -> list[float]:
    """Error of bases; and of codes, in root mean squares, beyond half a step of their scale."""
    expected, v = wanted
    at = places[:2]
    base = np.asarray(found.scales.key_base)[at].astype(np.float64)
    whole = {
        "key": found.scales.key_scale[places][..., None] * found.key[places].astype(float) + base,
        "value": found.scales.value_scale[places][..., None] * found.value[places].astype(float),
    }
    errors = []
    for name, exact in (("key", expected), ("value", v.astype(np.float64))):
        step = getattr(found.scales, f"{name}_scale")[places][..., None]
        beyond = np.maximum(np.abs(whole[name] - exact) - HALF_A_STEP * step, 0)
        errors.append(float(beyond.max() / np.sqrt((exact**2).mean())))
    is_first = np.broadcast_to(places[2] == 0, expected.shape[:3])
    if is_first.any():
        errors.append(relative_error(base[is_first], expected[is_first]))
    untouched = np.ones(found.scales.key_base.shape[:1], bool)
    untouched[np.broadcast_to(places[0], expected.shape[:3])[is_first]] = False
    before = np.asarray(arrays[11].key_base)
    errors.append(0.0 if _same(found.scales.key_base[untouched], before[untouched]) else np.inf)
    return errors


def _same(one: Any, two: Any) -> bool:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True)
    return all(x.tobytes() == y.tobytes() for x, y in pairs)


def measure(spec: Spec, arrays: list[Any], run: Any) -> float:
    """Seconds a call; each writes to the pools that the one before wrote to.

    What else the calls of a program return is kept to its end, lest XLA leave it out.
    """
    turns = min(MOST_TURNS, max(1, -(-int(ROTATED_BYTES) // spec.nbytes)))
    projections = [
        tuple(x + jnp.asarray(turn, x.dtype) for x in arrays[:3]) for turn in range(turns)
    ]
    shared = (tuple(arrays[3:7]), tuple(arrays[9:11]))
    q = jax.ShapeDtypeStruct((*arrays[0].shape[:3], spec.width), arrays[0].dtype)
    cached = spec.cache != "none"
    pools = (*arrays[7:9], arrays[11]) if cached else ()
    kept = (q,) if cached else (q, *arrays[1:3])

    def call(carry: Any, projected: Any, shared: Any) -> Any:
        pools, results = carry
        written = (*pools[:2], *shared[1], *pools[2:]) if cached else ()
        new = run(*projected, *shared[0], *written)
        pools = (new.key, new.value, new.scales) if cached else ()
        return pools, (new[: len(kept)], *results[:-1])

    zeros = tuple(jnp.zeros(x.shape, x.dtype) for x in kept)
    results = (zeros,) * (-(-CALLS_A_STEP // turns) * turns)
    return seconds_per_call(call, (pools, results), projections, shared)


def sweep(spec: Spec, arrays: list[Any]) -> list[dict[str, Any]]:
    """Times of other configurations, the fastest first."""
    first = heuristic(spec.batch * spec.new_tokens, spec.width)
    rows = []
    for tile, warps in itertools.product((1, 2, 4, 8, 16), (1, 2, 4, 8)):
        config = Config(tile, warps)
        if config == first or not 64 <= tile * spec.width // warps <= 1024:
            continue
        run = _with_defaults(functools.partial(triton.attention_inputs, config=config), spec)
        rows.append({"tile": tile, "num_warps": warps, "seconds": measure(spec, arrays, run)})
    return sorted(rows, key=lambda row: row["seconds"])


def _with_defaults(function: Any, spec: Spec) -> Any:
    """The kernel's own function, called with as many arrays as the api is."""

    def run(*arrays: Any) -> Any:
        return function(*arrays, *[None] * (12 - len(arrays)), **spec.settings())

    return run


def main() -> int:
    """Check and time the cases that the arguments select."""
    results = Results.begin("attention_inputs", "attention_inputs", seconds=SECONDS)
    for name in results.selected(SPECS):
        results.add(name, _case(SPECS[name], results.copy, results.args.sweep))
    return results.finish(_print_table)


def _case(spec: Spec, copy: float, swept: bool) -> dict[str, Any]:
    arrays = arguments(spec)
    both = {
        name: functools.partial(attention_inputs, implementation=name, **spec.settings())
        for name in ("triton", "reference")
    }
    row = check(spec, arrays, both["triton"])
    row["seconds"] = measure(spec, arrays, both["triton"])
    row["reference_seconds"] = measure(spec, arrays, both["reference"])
    row["nbytes"] = spec.nbytes
    row["of_copy"] = spec.nbytes / row["seconds"] / copy
    if swept:
        row["sweep"] = sweep(spec, arrays)
    return row


def _print_table(figures: dict[str, dict[str, Any]]) -> None:
    print(
        f"\n{'case':36} {'error':>8} {'bar':>8} {'bits':>6} {'us':>8} {'XLA us':>8} {'of copy':>7}"
    )
    for name, row in figures.items():
        cells = (
            f"{name:36}",
            f"{row['error']:8.1e}",
            f"{row['bar']:8.1e}",
            f"{'same' if row['repeats'] else 'DIFFER':>6}",
            f"{row['seconds'] * 1e6:8.2f}",
            f"{row['reference_seconds'] * 1e6:8.2f}",
            f"{row['of_copy']:7.1%}{'' if row['right'] else '  WRONG'}",
        )
        print(" ".join(cells))
        for other in row.get("sweep", [])[:6]:
            print(
                f"    {other['seconds'] * 1e6:8.2f}  tile {other['tile']}  "
                f"warps {other['num_warps']}"
            )


if __name__ == "__main__":
    sys.exit(main())
