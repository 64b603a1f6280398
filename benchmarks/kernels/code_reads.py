"""How fast codes of experts can be read, by how they lie in memory: nothing is computed with them.

    python benchmarks/kernels/code_reads.py [--only PART_OF_A_NAME] [--output FILE]

Programs read what those of `expert_dispatch` read at 32 tokens: each 32 rows of one of 163 of 256
experts, 2048 inputs at 3 bits, so many units at once. In "rows" a row's words lie as in
`dequant_matmul.layout`, and pieces are as long as their name says. In "tiles" the words of eight
rows and four units lie side by side, 128 bytes. What is read must be each expert's words, once. "of
copy" is the share of the bandwidth of a 4 GiB copy, which reads and writes. Without `--output`, the
JSON goes into the folder that $OUT names, if it names one. Exits with 1 if a case is wrong.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from benchmarks.kernels.results import Results
from benchmarks.kernels.timing import Chain
from pallas_kernels._compat import triton_call
from pallas_kernels.dequant_matmul.operands import iota, load

SECONDS = 60
CALLS = 16
EXPERTS, READ = 256, 163
ROWS, BITS, UNITS = 1024, 3, 64
OWN = 32
TILE_ROWS, TILE_UNITS = 8, 4


@dataclasses.dataclass(frozen=True)
class Reads:
    """How programs read.

    Attributes:
        units: of each row, that are read at once.
        tiled: whether words lie in tiles.
        num_warps: warps a program.
    """

    units: int
    tiled: bool = False
    num_warps: int = 2

    def place(self, row: Any, word: int, unit: Any) -> Any:
        """Where a word of an expert is."""
        if not self.tiled:
            return row * (BITS * UNITS) + word * UNITS + unit
        div, rem = jax.lax.div, jax.lax.rem
        tile = div(row, TILE_ROWS) * (UNITS // TILE_UNITS) + div(unit, TILE_UNITS)
        inside = rem(row, TILE_ROWS) * TILE_UNITS + rem(unit, TILE_UNITS)
        return (tile * BITS + word) * (TILE_ROWS * TILE_UNITS) + inside

    def run(self, first: jax.Array, words: jax.Array, experts: jax.Array) -> jax.Array:
        """All words of the experts, from a first one on, added with wrap-around by program."""
        tiles = ROWS // OWN

        def kernel(first_ref: Any, words_ref: Any, experts_ref: Any, out_ref: Any) -> None:
            program = pl.program_id(0)
            expert = first_ref[0] + experts_ref[jax.lax.div(program, tiles)]
            start = expert * (ROWS * BITS * UNITS)
            size = OWN, self.units
            row = jax.lax.rem(program, tiles) * OWN + iota(size, 0)

            def add(step: Any, total: Any) -> Any:
                unit = step * self.units + iota(size, 1)
                places = [self.place(row, word, unit) for word in range(BITS)]
                return functools.reduce(
                    operator.add, [load(words_ref, start + place) for place in places], total
                )

            total = jnp.zeros(size, jnp.uint32)
            total = jax.lax.fori_loop(0, UNITS // self.units, add, total)
            out_ref[program] = jnp.sum(total.astype(jnp.int32))

        return triton_call(
            kernel,
            num_warps=self.num_warps,
            num_stages=1,
            name="code_reads",
            grid=(READ * tiles,),
            out_shape=jax.ShapeDtypeStruct((READ * tiles,), jnp.int32),
        )(first, words, experts)


CASES = {
    **{
        f"rows, {4 * units} bytes, {warps} warps": Reads(units, num_warps=warps)
        for units in (4, 8, 16, 32, 64)
        for warps in (1, 2, 4)
    },
    **{
        f"tiles, {units} units, {warps} warps": Reads(units, True, warps)
        for units in (4, 8, 16, 32)
        for warps in (1, 2, 4)
    },
}


def main() -> int:
    """Check and time the cases that the arguments select."""
    results = Results.begin("code_reads", "reads of codes", seconds=SECONDS)
    assert results.copy is not None
    size = EXPERTS * ROWS * BITS * UNITS
    words = jax.random.bits(jax.random.key(0), (size,), jnp.uint32)
    sums = jnp.sum(words.reshape(EXPERTS, -1).astype(jnp.int32), axis=1)
    first, rng = jnp.zeros(1, jnp.int32), np.random.default_rng(0)
    inputs = [jnp.asarray(rng.permutation(EXPERTS)[:READ], jnp.int32) for _ in range(CALLS)]
    for name in results.selected(CASES):
        run = CASES[name].run
        found = jax.jit(run)(first, words, inputs[0]).reshape(READ, -1).sum(axis=1)
        right = bool(jnp.array_equal(found, sums[inputs[0]]))
        calls = [(words, experts) for experts in inputs]
        chain = Chain.of_equals(lambda x, one, run=run: run(x, *one), first, calls, CALLS)
        seconds = chain.seconds()
        of_copy = READ * ROWS * BITS * UNITS * 4 / seconds / results.copy
        results.add(name, {"seconds": seconds, "of_copy": of_copy, "right": right})
    return results.finish(_print_table)


def _print_table(figures: dict[str, dict[str, Any]]) -> None:
    print(f"\n{'case':32} {'us':>8} {'of copy':>8}")
    for name, row in figures.items():
        print(
            f"{name:32} {row['seconds'] * 1e6:8.2f} {row['of_copy']:8.1%}"
            + ("" if row["right"] else "  WRONG")
        )


if __name__ == "__main__":
    sys.exit(main())
