"""`gated_delta_rule` on a GPU: first right, then fast.

    python benchmarks/kernels/delta_rule.py [--only PART_OF_A_NAME] [--output FILE]

Each case is compared with the formulas, token by token in float64, with NaN in all that must not be
read; decoding must give the same bits 200 times. Then the cases of `specs.SPECS` are timed:
decoding in place on more than 200 MB of states in turn, prefill kernel by kernel too; and other
ways to cut the work, as long as there is time. "of copy" is the share of the bandwidth of a 4 GiB
copy that reading and writing the state alone makes. Without `--output`, the JSON goes into the
folder that $OUT names, if it names one. Exits with 1 if a case is wrong.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels.delta_rule_cases import Case, arguments, expected
from benchmarks.kernels.timing import RUNS, SECONDS_A_RUN, copy_bytes_per_second
from pallas_kernels._compat import current_target
from pallas_kernels.delta_rule import chunked, gated_delta_rule
from pallas_kernels.delta_rule.config import DecodeConfig, PassConfig, decode_config, pass_config
from pallas_kernels.delta_rule.decode import decode
from pallas_kernels.delta_rule.specs import SPECS, Spec
from pallas_kernels.testing import decode_bar, relative_error
from qwen_jax.cli.provenance import provenance

ROTATED_BYTES = 220e6
REPEATS = 200
SECONDS = 85

RAGGED = {"lengths": (515, 0, 1, 63, 64, 65, 200, 128), "start": (0, 5, 0, 1, 64, 3, 0, 7)}
CHECKED = {
    "ragged": Case(Spec(8, 515, dtype="float32"), **RAGGED),
    "ragged, bfloat16": Case(Spec(8, 515, heads=48), **RAGGED),
    "repeating, weak": Case(Spec(1, 1024, dtype="float32"), (), (0,), "repeating", "weak"),
    "repeating, strong at times": Case(
        Spec(1, 1024, dtype="float32"), (), (0,), "repeating", "strong at times"
    ),
    "random, weak": Case(Spec(1, 1024, dtype="float32"), (), (0,), "random", "weak"),
    "decode, ragged, 64 heads": Case(Spec(8, heads=64), (1, 1, 1, 0, 1), (0, 1, 2, 3, 9, 6, 0)),
}
DECODE = [(16, 1), (16, 2), (32, 2), (32, 4), (64, 4), (64, 8), (128, 8)]
PASS = [(32, 4, 2), (16, 4, 1), (16, 4, 2), (32, 4, 1), (32, 8, 2), (64, 4, 1), (64, 4, 2)]
SWEPT = {
    "decode, batch 1": DECODE,
    "decode, batch 32": DECODE,
    "prefill, 8k": PASS,
    "prefill, 8k, float32": PASS[:4],
    "prefill, 32 x 512": PASS[:4],
    "prefill, 512 tokens": PASS[:4],
}


def check(case: Case) -> dict[str, Any]:
    """Greatest errors over the root mean square, and whether the bits repeat."""
    arrays, spec = arguments(case), case.spec
    run = jax.jit(functools.partial(gated_delta_rule, implementation="triton"))
    first = run(*arrays)
    read, ring, state = expected(arrays)
    decoding = spec.length == 1
    own = 1e-5 if decoding else 1e-4
    short = spec.dtype == "bfloat16"
    bars = [
        decode_bar(read, "bfloat16") if short else own,
        decode_bar(state, "bfloat16") if spec.state_dtype == "bfloat16" else own,
    ]
    # Products in halves of bfloat16 keep about 16 bits.
    if short and not decoding:
        bars[1] = max(bars[1], 1e-3)
    # Rows without tokens keep their NaN; compared are the others.
    live = np.asarray(arrays[9]) > 0
    row = {
        "error": relative_error(first.mixed[live], read[live]),
        "bar": bars[0],
        "state_error": relative_error(first.delta_state[live], state[live]),
        "state_bar": bars[1],
        "ring": bool(np.array_equal(np.asarray(first.conv_state, np.float64), ring, True)),
        "idle": _same_bits(first.delta_state[~live], arrays[7][~live])
        and not np.asarray(first.mixed[~live]).any(),
    }
    repeats = REPEATS if decoding else 5
    others = (run(*arrays) for _ in range(repeats))
    row["repeats"] = all(
        _same_bits(one, two)
        for other in others
        for one, two in zip(jax.tree.leaves(first), jax.tree.leaves(other), strict=True)
    )
    row["right"] = (
        row["error"] <= bars[0]
        and row["state_error"] <= bars[1]
        and row["ring"]
        and row["idle"]
        and row["repeats"]
    )
    return row


@jax.jit
def _equal_bits(one: jax.Array, two: jax.Array) -> jax.Array:
    kind = {2: jnp.uint16, 4: jnp.uint32}[one.dtype.itemsize]
    return jnp.array_equal(*(jax.lax.bitcast_convert_type(x, kind) for x in (one, two)))


def _same_bits(one: jax.Array, two: jax.Array) -> bool:
    return bool(_equal_bits(one, two))


def _median_seconds(loop: Callable[..., Any], carry: Any, calls: int) -> float:
    """Time of one of the calls that one iteration of a compiled loop makes."""

    def run(carry: Any, repeats: int) -> tuple[Any, float]:
        count = jnp.int32(repeats)
        start = time.perf_counter()
        carry = jax.block_until_ready(loop(carry, count))
        return carry, time.perf_counter() - start

    carry, _ = run(carry, 1)
    carry, once = run(carry, 1)
    repeats, times = max(1, round(SECONDS_A_RUN / once)), []
    for _ in range(RUNS):
        carry, seconds = run(carry, repeats)
        times.append(seconds)
    return statistics.median(times) / (repeats * calls)


def decode_seconds(spec: Spec, config: DecodeConfig) -> float:
    """Time of a call that updates its states in place; more states than the cache holds in turn.

    All calls share one ring, so that none can start before the one before has ended.
    """
    *inputs, ring, state, start, lengths = arguments(Case(spec))
    turns = max(1, -(-int(ROTATED_BYTES) // spec.state_bytes))

    @functools.partial(jax.jit, donate_argnums=0)
    def loop(carry: Any, repeats: jax.Array) -> Any:
        def body(_: jax.Array, carry: Any) -> Any:
            ring, states = carry
            states = list(states)
            for turn in range(turns):
                _, ring, states[turn] = decode(
                    *inputs, ring, states[turn], start, lengths, config=config
                )
            return ring, tuple(states)

        return jax.lax.fori_loop(0, repeats, body, carry)

    states = tuple(jnp.copy(state) for _ in range(turns))
    return _median_seconds(loop, (jnp.copy(ring), states), turns)


def seconds(function: Callable[..., Any], arrays: tuple[Any, ...], lengths: jax.Array) -> float:
    """Time of `function(*arrays, lengths)`, each call of which waits for the one before."""

    @jax.jit
    def loop(carry: tuple[jax.Array, Any], repeats: jax.Array) -> tuple[jax.Array, Any]:
        def body(_: jax.Array, carry: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
            lengths, arrays = carry
            first = jax.tree.leaves(function(*arrays, lengths))[0].reshape(-1)[0]
            # Zero, which the compiler cannot know.
            return lengths + (first == 12345.678).astype(jnp.int32), arrays

        return jax.lax.fori_loop(0, repeats, body, carry)

    return _median_seconds(loop, (lengths, arrays), 1)


def prefill_seconds(spec: Spec) -> dict[str, float]:
    """Time of a call and of its kernels; the inverse's with a copy of what it works on."""
    *inputs, start, lengths = arguments(Case(spec))
    whole = functools.partial(gated_delta_rule, implementation="triton")
    step, given = _steps(spec, pass_config(current_target(), spec.arguments()[7]))
    times = {"seconds": seconds(whole, (*inputs, start), lengths)}
    for name, arrays in given.items():
        times[name] = seconds(getattr(step, name), arrays, lengths)
    return times


def _steps(spec: Spec, config: PassConfig) -> tuple[chunked.Steps, dict[str, tuple[Any, ...]]]:
    """The kernels of a prefill, and what each takes before `lengths`."""
    qkv, b, a, weight, a_log, dt_bias, ring, state, start, lengths = arguments(Case(spec))
    step = chunked.steps(spec.length, qkv.dtype, state.shape, config)
    qk, v = jax.jit(step.inputs)(qkv, weight, ring, start, lengths)
    overlap = jax.jit(step.overlap)(qk, b, a, a_log, dt_bias, lengths)
    solution = jax.jit(step.inverse)(overlap.system, overlap.beta, lengths)
    return step, {
        "inputs": (qkv, weight, ring, start),
        "overlap": (qk, b, a, a_log, dt_bias),
        "inverse": (overlap.system, overlap.beta),
        "passing": (qk, v, solution, overlap, state, start),
    }


def sweep(spec: Spec, cuts: list[tuple[int, ...]], until: float) -> list[dict[str, Any]]:
    """Times of other configurations, the fastest first."""
    rows = []
    for cut in cuts:
        if time.monotonic() > until:
            break
        try:
            if spec.length == 1:
                config = DecodeConfig(*cut)
                taken = decode_seconds(spec, config)
            else:
                config = PassConfig(*cut)
                step, given = _steps(spec, config)
                taken = seconds(step.passing, given["passing"], arguments(Case(spec))[9])
            rows.append({**dataclasses.asdict(config), "seconds": taken})
        except Exception as error:
            print(f"    {cut}: {str(error)[:200]}", flush=True)
    return sorted(rows, key=lambda row: row["seconds"])


def main() -> int:
    """Check and time the cases that the arguments select."""
    parser = argparse.ArgumentParser(description="Check and time gated_delta_rule on a GPU.")
    parser.add_argument("--only", default="", help="part of the name of the cases")
    parser.add_argument("--output", type=Path, help="file to write the JSON result to")
    parser.add_argument("--commit", help="the commit, where the code is a copy without its history")
    args = parser.parse_args()
    if jax.default_backend() != "gpu":
        raise SystemExit(f"needs a GPU, and JAX sees {jax.default_backend()}")
    until, copy, figures = time.monotonic() + SECONDS, copy_bytes_per_second(), {}
    print(f"copy: {copy / 1e12:.2f} TB/s read and written", flush=True)
    cases = CHECKED | {name: Case(spec) for name, spec in SPECS.items()}
    for name, case in cases.items():
        if args.only not in name:
            continue
        if time.monotonic() > until:
            print(f"{name}: not run, since {SECONDS} s are over", flush=True)
            continue
        figures[name] = check(case)
        if name in SPECS:
            figures[name] |= _time(case.spec, copy)
        print(f"{name}: {figures[name]}", flush=True)
    for name, cuts in SWEPT.items():
        if name in figures and time.monotonic() < until:
            figures[name]["sweep"] = sweep(SPECS[name], cuts, until)
    output = args.output
    if output is None and os.environ.get("OUT"):
        output = Path(os.environ["OUT"]) / "delta-rule.json"
    if output is not None:
        result = provenance(["python", "benchmarks/kernels/delta_rule.py", *sys.argv[1:]])
        result["commit"] = result["commit"] or args.commit
        result |= {"benchmark": "delta_rule", "copy_bytes_per_second": copy, "figures": figures}
        output.write_text(json.dumps(result, indent=2) + "\n")
    _print_table(figures)
    return 0 if all(row["right"] for row in figures.values()) else 1


def _time(spec: Spec, copy: float) -> dict[str, Any]:
    if spec.length > 1:
        return prefill_seconds(spec)
    taken = decode_seconds(spec, decode_config(current_target(), spec.arguments()[7]))
    return {"seconds": taken, "of_copy": 2 * spec.state_bytes / taken / copy}


def _print_table(figures: dict[str, dict[str, Any]]) -> None:
    print(f"\n{'case':34} {'error':>8} {'bar':>8} {'state':>8} {'bar':>8} {'bits':>6} {'us':>8}")
    for name, row in figures.items():
        cells = [f"{name:34}"]
        cells += [f"{row[key]:8.1e}" for key in ("error", "bar", "state_error", "state_bar")]
        cells.append(f"{'same' if row['repeats'] else 'DIFFER':>6}")
        if "seconds" in row:
            cells.append(f"{row['seconds'] * 1e6:8.2f}")
        if "of_copy" in row:
            cells.append(f"{row['of_copy']:6.1%} of copy")
        for part in ("inputs", "overlap", "inverse", "passing"):
            if part in row:
                cells.append(f"{part} {row[part] * 1e6:.0f}")
        print(" ".join(cells) + ("" if row["right"] else "  WRONG"))
        for other in row.get("sweep", []):
            cut = "  ".join(f"{key} {value}" for key, value in other.items() if key != "seconds")
            print(f"    {other['seconds'] * 1e6:8.2f}  {cut}")


if __name__ == "__main__":
    sys.exit(main())
