"""How the work of more than 64 tokens is cut."""

from __future__ import annotations

import dataclasses

from .._compat import Target
from ..tuning import varied

# From so many rows an expert on, making its matrices in bfloat16 is the smaller part.
UNPACKED_ROWS = 96


@dataclasses.dataclass(frozen=True)
class Grouped:
    """How a product of tiles with their experts' matrices is cut.

    Attributes:
        outputs: outputs a program, a power of two; of gates and of the rows above, so many each.
        units: units of 32 inputs that are multiplied at once, a power of two. Up to a group's,
            and in one turn, codes are multiplied as integers and scales come to the sums; beyond,
            scales come to the codes, which are rounded to bfloat16.
        num_warps: warps a program.
        num_stages: see `_compat.triton_call`.
        turns: how many times so many units are read at once, a power of two: memory is read in
            sectors of 32 bytes, and eight units of one word are one.
    """

    outputs: int = 128
    units: int = 2
    num_warps: int = 8
    num_stages: int = 3
    turns: int = 1


@dataclasses.dataclass(frozen=True)
class ManyTokens:
    """How the work is cut.

    Attributes:
        rows: most rows of a tile, a power of two from 16 on.
        gate_up: of the first product.
        down: of the second.
        unpacked: whether matrices in codes are made in bfloat16 first, some experts at a time.
    """

    rows: int
    gate_up: Grouped
    down: Grouped
    unpacked: bool


def heuristic(target: Target, tokens: int, slots: int, experts: int) -> ManyTokens:
    """A configuration for a call's sizes on a device.

    Args:
        target: the device.
        tokens: M.
        slots: A.
        experts: E.
    """
    mean = tokens * slots / experts
    if mean >= UNPACKED_ROWS:
        # The first has two sums.
        gate_up = Grouped(128 if target.spares_registers else 64, 2, 8, 3)
        return ManyTokens(128, gate_up, Grouped(128, 2, 8, 3), True)
    rows = 16
    while rows < 64 and rows < 1.25 * mean:
        rows *= 2
    return ManyTokens(rows, Grouped(64, 2, 4, 3), Grouped(64, 2, 4, 3), False)


def others(config: ManyTokens) -> list[ManyTokens]:
    """What may be tried in place of a heuristic's configuration."""
    cuts = [Grouped(64, 2, 4, 3), Grouped(64, 2, 4, 4), Grouped(64, 4, 4, 3), Grouped(128, 2, 8, 3)]
    if config.unpacked:
        cuts = [Grouped(128, 2, 8, 4), Grouped(64, 2, 8, 3), Grouped(64, 2, 4, 4)]
    rows = [size for size in (config.rows // 2, config.rows * 2) if 16 <= size <= 128]
    return varied(config, rows=rows, gate_up=cuts, down=cuts)
