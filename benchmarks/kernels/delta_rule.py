"""`gated_delta_rule` on a GPU: first right, then fast.

    python benchmarks/kernels/delta_rule.py [--only PART_OF_A_NAME] [--sweep] [--output FILE]

Each case is compared with the formulas, token by token in float64, with NaN in all that must not be
read; decoding must give the same bits 200 times. Then the cases of `specs.SPECS` are timed:
decoding in place on more than 200 MB of states in turn, prefill kernel by kernel too; and with
`--sweep` other ways to cut the work, as long as there is time. "of copy" is the share of the
bandwidth of a 4 GiB copy that reading and writing the state alone makes. Without `--output`, the
JSON goes into the folder that $OUT names, if it names one. Exits with 1 if a case is wrong.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import jax
import jax.numpy as jnp

from benchmarks.kernels.delta_rule_cases import Case, arguments, expected, relative_errors
from benchmarks.kernels.delta_rule_times import decode_seconds, prefill_seconds, sweep
from benchmarks.kernels.results import Results
from pallas_kernels.delta_rule import gated_delta_rule
from pallas_kernels.delta_rule.specs import SPECS, Spec

REPEATS = 200
SECONDS = 100

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
DECODE = [(32, 2), (32, 4), (64, 4)]
PASS = [(64, 4, 2), (64, 4, 1), (32, 4, 1), (128, 8, 1)]
SWEPT = {
    "decode, batch 1": DECODE,
    "decode, batch 32": DECODE,
    "decode, batch 32, bfloat16 state": [*DECODE, (128, 4), (128, 8)],
    "prefill, 8k": PASS,
    "prefill, 32 x 512": PASS,
    "prefill, 8k, float32": [(64, 4, 1), (32, 4, 1)],
}


def check(case: Case) -> dict[str, Any]:
    """Greatest errors over the root mean square, and whether the bits repeat."""
    arrays, spec = arguments(case), case.spec
    run = jax.jit(functools.partial(gated_delta_rule, implementation="triton"))
    first = run(*arrays)
    read, ring, state = expected(arrays)
    live = arrays[9] > 0  # rows without tokens keep what they hold, which may be NaN
    error, rounding = relative_errors(first.mixed, read, live)
    state_error, state_rounding = relative_errors(first.delta_state, state, live)
    decoding, short = spec.length == 1, spec.dtype == "bfloat16"
    own = 1e-5 if decoding else 1e-4
    state_bar = 1e-2 + state_rounding if spec.state_dtype == "bfloat16" else own
    if short and not decoding:
        state_bar = max(state_bar, 1e-3)  # operands of products keep 18 bits
    row = {
        "error": error,
        "bar": 1e-2 + rounding if short else own,
        "state_error": state_error,
        "state_bar": state_bar,
        "ring": _equal(first.conv_state, ring),
        "idle": _same_bits(first.delta_state[~live], arrays[7][~live])
        and not bool(first.mixed[~live].any()),
    }
    repeats = REPEATS if decoding else 5
    others = (run(*arrays) for _ in range(repeats))
    row["repeats"] = all(
        _same_bits(one, two)
        for other in others
        for one, two in zip(jax.tree.leaves(first), jax.tree.leaves(other), strict=True)
    )
    row["right"] = (
        row["error"] <= row["bar"]
        and row["state_error"] <= row["state_bar"]
        and row["ring"]
        and row["idle"]
        and row["repeats"]
    )
    return row


def _equal(one: jax.Array, two: jax.Array) -> bool:
    with jax.enable_x64(True):
        return bool(jnp.array_equal(one.astype(jnp.float64), two, equal_nan=True))


@jax.jit
def _equal_bits(one: jax.Array, two: jax.Array) -> jax.Array:
    kind = {2: jnp.uint16, 4: jnp.uint32}[one.dtype.itemsize]
    return jnp.array_equal(*(jax.lax.bitcast_convert_type(x, kind) for x in (one, two)))


def _same_bits(one: jax.Array, two: jax.Array) -> bool:
    return bool(_equal_bits(one, two))


def main() -> int:
    """Check and time the cases that the arguments select."""
    results = Results.begin("delta_rule", "gated_delta_rule", seconds=SECONDS)
    cases = CHECKED | {name: Case(spec) for name, spec in SPECS.items()}
    for name in results.selected(cases):
        row = check(cases[name])
        if name in SPECS:
            row |= _time(SPECS[name], results.copy)
        if results.args.sweep and name in SWEPT:
            row["sweep"] = sweep(SPECS[name], SWEPT[name], results.until)
        results.add(name, row)
    return results.finish(_print_table)


def _time(spec: Spec, copy: float) -> dict[str, Any]:
    if spec.length > 1:
        return prefill_seconds(spec)
    taken = decode_seconds(spec)
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
