"""How the work of the kernel of few rows is cut."""

from __future__ import annotations

import dataclasses

from jax.experimental import pallas as pl

# More rows than these are multiplied by XLA.
FEW_ROWS = 64
MOST_ROWS, MOST_EXPERTS, MOST_WARPS = 8, 4, 4
# So many times rows or experts are read at once by a thread.
READS = 32


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work is cut.

    Attributes:
        rows: rows a program, a power of two.
        experts: experts a warp, a power of two.
        num_warps: warps a program, each with experts of its own.
        steps: how many pieces of rows are read before they are multiplied.
    """

    rows: int = 1
    experts: int = 1
    num_warps: int = 1
    steps: int = 8


def heuristic(cores: int, rows: int, experts: int) -> Config:
    """The cut by which least is read, of those that give most multiprocessors a program.

    Args:
        cores: multiprocessors.
        rows: M.
        experts: E.
    """
    cuts = [
        Config(r, e, warps, max(1, min(8, READS // (2 * r + e))))
        for r in (1, 2, 4, MOST_ROWS)
        for e in (1, 2, MOST_EXPERTS)
        for warps in (1, 2, MOST_WARPS)
        if r < 2 * rows and e * warps < 2 * experts
    ]

    def programs(cut: Config) -> int:
        return pl.cdiv(rows, cut.rows) * pl.cdiv(experts, cut.experts * cut.num_warps)

    def read(cut: Config) -> int:
        return programs(cut) * (2 * cut.rows + cut.experts * cut.num_warps)

    enough = [cut for cut in cuts if 3 * programs(cut) >= 2 * cores]
    return min(enough or cuts[:1], key=read)
