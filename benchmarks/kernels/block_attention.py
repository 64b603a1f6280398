"""`block_attention` on a GPU: first right, then fast.

    python benchmarks/kernels/block_attention.py [--only PART_OF_A_NAME] [--sweep] [--output FILE]

Each case is compared with a float64 softmax on the host, with NaN in all rows of the pool that hold
no token, and must give the same bits when run again. Int8 blocks are compared with what their codes
stand for, and with the keys and values that were rounded, of which one channel is near 200 in all
keys: there the error's norm counts. Then it is timed with more than 200 MB of keys
and values in turn. "of copy" is the share of the bandwidth of a 4 GiB copy that the bytes of keys
and values alone make. With `--sweep`, other ways to cut the work are timed too. Without `--output`,
the JSON goes into the folder that $OUT names, if it names one. Exits with 1 if a case is wrong.
"""

from __future__ import annotations

import dataclasses
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
from benchmarks.kernels.timing import seconds_per_call
from pallas_kernels._compat import current_target
from pallas_kernels.attention.scales import quantise
from pallas_kernels.block_attention import BlockScales, block_attention, triton
from pallas_kernels.block_attention.config import Config, config_for
from pallas_kernels.block_attention.specs import SPECS, Spec
from pallas_kernels.testing import decode_bar, norm_error, relative_error

ROTATED_BYTES = 220e6
REPEATS = 20
SECONDS = 85
SWEPT = ("batch 1, 512", "batch 1, 32k", "batch 8, 32k", "batch 1, 32k, int8", "batch 8, 32k, int8")
OUTLIER = 200.0
INT8_BAR = 2e-2


@dataclasses.dataclass
class Inputs:
    """The arrays of a case: one pool, and tables that point into it one after the other.

    `plain` are keys and values before they were rounded to int8, if they were.
    """

    q: jax.Array
    key_blocks: jax.Array
    value_blocks: jax.Array
    tables: list[jax.Array]
    positions: jax.Array
    scales: BlockScales | None = None
    plain: tuple[jax.Array, jax.Array] | None = None

    @classmethod
    def of(cls, spec: Spec) -> Inputs:
        """Random keys and values; NaN where no token is."""
        rng = np.random.default_rng(0)
        size, owned = spec.block_size, [-(-length // spec.block_size) for length in spec.lengths]
        turns = max(1, -(-int(ROTATED_BYTES) // spec.kv_bytes))
        order = rng.permutation(np.arange(1, 1 + turns * sum(owned)))
        live = np.zeros((1 + len(order), size), bool)
        tables = np.zeros((turns, len(spec.lengths), spec.columns), np.int32)
        used = 0
        for turn, (row, blocks) in itertools.product(range(turns), enumerate(owned)):
            ids = order[used : used + blocks]
            used += blocks
            tables[turn, row, :blocks] = ids
            live[ids] = np.arange(blocks * size).reshape(blocks, size) < spec.lengths[row]
        key, value, query = jax.random.split(jax.random.key(0), 3)
        dtype = jnp.dtype(spec.dtype)
        shape = (len(live), spec.kv_heads, size, spec.width)

        @jax.jit
        def pool(key: jax.Array, live: jax.Array, centre: jax.Array) -> jax.Array:
            # Drawn in float32: in bfloat16 there would be a few hundred different numbers, whose
            # roundings to int8 have the same sign again and again.
            values = (jax.random.normal(key, shape, jnp.float32) + centre).astype(dtype)
            return jnp.where(live[:, None, :, None], values, jnp.nan)

        q_shape = (len(owned), spec.new_tokens, spec.query_heads, spec.width)
        back = np.arange(-spec.new_tokens, 0, dtype=np.int32)
        positions = np.asarray(spec.lengths, np.int32)[:, None] + back[None, :]
        nowhere = np.zeros(spec.width, np.float32)
        centre = np.where(np.arange(spec.width) == 3, np.float32(OUTLIER * spec.int8), nowhere)
        plain = pool(key, live, centre), pool(value, live, nowhere)
        coded, scales = _coded(*plain) if spec.int8 else (plain, None)
        return cls(
            jax.random.normal(query, q_shape, dtype),
            *coded,
            [jnp.asarray(table) for table in tables],
            jnp.asarray(positions),
            scales,
            plain if spec.int8 else None,
        )

    def _tokens(self, spec: Spec, ids: jax.Array, *, rounded: bool) -> list[np.ndarray]:
        """Keys and values [K, S, H] of these blocks, float64."""
        pools = (self.key_blocks, self.value_blocks)
        if self.plain is not None and not rounded:
            pools = self.plain
        blocks = [np.asarray(pool[ids]).astype(np.float64) for pool in pools]
        if self.scales is not None and rounded:
            key_scale, value_scale, base = (
                np.asarray(array[ids]).astype(np.float64) for array in self.scales
            )
            blocks[0] = blocks[0] * key_scale[..., None] + base[:, :, None]
            blocks[1] = blocks[1] * value_scale[..., None]
        return [np.swapaxes(x, 0, 1).reshape(spec.kv_heads, -1, spec.width) for x in blocks]

    def expected(self, spec: Spec, *, rounded: bool = True) -> np.ndarray:
        """Softmax attention over the first table in float64, on the host.

        Args:
            spec: the case.
            rounded: over what int8 codes stand for, not over what they were made of.
        """
        q, positions = np.asarray(self.q).astype(np.float64), np.asarray(self.positions)
        result = np.zeros(q.shape)
        group = spec.query_heads // spec.kv_heads
        for row, length in enumerate(spec.lengths):
            ids = self.tables[0][row, : -(-length // spec.block_size)]
            keys, values = self._tokens(spec, ids, rounded=rounded)
            for head, token in itertools.product(range(spec.kv_heads), range(spec.new_tokens)):
                at = positions[row, token]
                if at < 0:
                    continue
                seen = np.arange(at + 1)
                if spec.window is not None:
                    seen = seen[(seen > at - spec.window) | (seen < spec.sinks)]
                heads = slice(head * group, (head + 1) * group)
                scores = q[row, token, heads] @ keys[head, seen].T
                weights = np.exp((scores - scores.max(axis=1, keepdims=True)) / spec.width**0.5)
                weights /= weights.sum(axis=1, keepdims=True)
                result[row, token, heads] = weights @ values[head, seen]
        return result


@jax.jit
def _coded(key: jax.Array, value: jax.Array) -> tuple[tuple[jax.Array, jax.Array], BlockScales]:
    """Pools as int8 codes; their scales are NaN where no token is."""
    base = key[:, :, 0]
    key_codes, key_scale = quantise(key.astype(jnp.float32) - base[:, :, None].astype(jnp.float32))
    value_codes, value_scale = quantise(value.astype(jnp.float32))
    empty = jnp.isnan(value[..., 0])
    key_scale, value_scale = (jnp.where(empty, jnp.nan, x) for x in (key_scale, value_scale))
    return (key_codes, value_codes), BlockScales(key_scale, value_scale, base)


def measure(spec: Spec, inputs: Inputs, run: Any) -> float:
    """Seconds a call of `run`, which takes the arrays of a call."""

    def call(q: jax.Array, table: jax.Array, shared: tuple[jax.Array, ...]) -> jax.Array:
        return run(q, *shared[:2], table, *shared[2:])

    shared = (inputs.key_blocks, inputs.value_blocks, inputs.positions, inputs.scales)
    return seconds_per_call(call, inputs.q, inputs.tables, shared)


def check(spec: Spec, inputs: Inputs, run: Any) -> dict[str, Any]:
    """Greatest error over the root mean square of the result, and whether the bits repeat."""
    arrays = (
        inputs.q,
        inputs.key_blocks,
        inputs.value_blocks,
        inputs.tables[0],
        inputs.positions,
        inputs.scales,
    )
    compiled = jax.jit(run)
    result = np.asarray(compiled(*arrays))
    again = [np.asarray(compiled(*arrays)) for _ in range(REPEATS)]
    expected = inputs.expected(spec)
    row = {
        "error": relative_error(result, expected),
        "bar": decode_bar(expected, spec.dtype),
        "repeats": all(np.array_equal(result, other) for other in again),
    }
    if spec.int8 and spec.dtype == "float32":
        # The outlier makes scores so large that their own rounding shows.
        row["bar"] += 4 * OUTLIER / spec.width**0.5 * 2**-23
    row["right"] = bool(row["error"] <= row["bar"] and row["repeats"])
    if spec.int8:
        exact = inputs.expected(spec, rounded=False)
        row["norm_error_of_int8"] = norm_error(result, exact)
        row["error_of_int8"] = relative_error(result, exact)
        row["right"] &= row["norm_error_of_int8"] <= INT8_BAR
    return row


def configurations(first: Config) -> list[Config]:
    """Other ways to cut the work, around the heuristic's."""
    found = [
        dataclasses.replace(first, tile=tile, ahead=ahead, num_warps=warps)
        for tile, ahead, warps in itertools.product((16, 32, 64), (1, 2, 3), (4, 8))
    ]
    for programs, splits in itertools.product((1, 2, 4), (0.25, 0.5, 1, 2)):
        cut = {"programs": programs * first.programs // 2, "splits": int(splits * first.splits)}
        found.append(dataclasses.replace(first, **cut))
    found.append(dataclasses.replace(first, splits=1))
    return [config for config in dict.fromkeys(found) if config != first and config.splits >= 1]


def sweep(spec: Spec, inputs: Inputs) -> list[dict[str, Any]]:
    """Times of other configurations, the fastest first."""
    first = config_for(current_target(), inputs.q, inputs.key_blocks, inputs.tables[0])
    rows = []
    for config in configurations(first):
        run = functools.partial(triton.block_attention, config=config, **spec.settings())
        try:
            rows.append({**dataclasses.asdict(config), "seconds": measure(spec, inputs, run)})
        except Exception as error:
            print(f"    {config}: {str(error)[:200]}", flush=True)
    return sorted(rows, key=lambda row: row["seconds"])


def main() -> int:
    """Check and time the cases that the arguments select."""
    results = Results.begin("block_attention", "block_attention", seconds=SECONDS)
    for name in results.selected(SWEPT if results.args.sweep else SPECS):
        results.add(name, _case(SPECS[name], results.copy, results.args.sweep))
    return results.finish(_print_table)


def _case(spec: Spec, copy: float, swept: bool) -> dict[str, Any]:
    run = functools.partial(block_attention, implementation="triton", **spec.settings())
    inputs = Inputs.of(spec)
    row = check(spec, inputs, run)
    row["seconds"] = measure(spec, inputs, run)
    row["kv_bytes"] = spec.kv_bytes
    row["of_copy"] = spec.kv_bytes / row["seconds"] / copy
    if swept:
        row["sweep"] = sweep(spec, inputs)
    return row


def _print_table(figures: dict[str, dict[str, Any]]) -> None:
    print(f"\n{'case':32} {'error':>8} {'bar':>8} {'bits':>6} {'us':>8} {'GB/s':>6} {'of copy':>7}")
    for name, row in figures.items():
        cells = (
            f"{name:32}",
            f"{row['error']:8.1e}",
            f"{row['bar']:8.1e}",
            f"{'same' if row['repeats'] else 'DIFFER':>6}",
            f"{row['seconds'] * 1e6:8.2f}",
            f"{row['kv_bytes'] / row['seconds'] / 1e9:6.0f}",
            f"{row['of_copy']:7.1%}{'' if row['right'] else '  WRONG'}",
        )
        if "error_of_int8" in row:
            cells += (f"int8: norm {row['norm_error_of_int8']:.1e} max {row['error_of_int8']:.1e}",)
        print(" ".join(cells))
        for other in row.get("sweep", [])[:12]:
            cut = "  ".join(f"{key} {value}" for key, value in other.items() if key != "seconds")
            print(f"    {other['seconds'] * 1e6:8.2f}  {cut}")


if __name__ == "__main__":
    sys.exit(main())
