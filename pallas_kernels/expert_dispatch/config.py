"""How the work of the kernels is cut."""

from __future__ import annotations

import dataclasses

from .many_tokens_config import ManyTokens
from .matrix import Matrix

FEW_TOKENS = 64
# Warps that keep a multiprocessor busy, and most outputs of a program.
LEAST_WARPS, MOST_OUTPUTS = 6, 4


@dataclasses.dataclass(frozen=True)
class Cut:
    """How a product is cut.

    Attributes:
        outputs: rows of the matrix a program, a power of two, at least `outputs_at_once`.
        units: units of each that are read at once, one a thread: a power of two.
        num_warps: warps a program.
        turns: of a loop over the outputs, a power of two, see `turns`.
    """

    outputs: int = 4
    units: int = 64
    num_warps: int = 2
    turns: int = 1

    @property
    def outputs_at_once(self) -> int:
        """Outputs whose units are read at once, by a thread each."""
        return 32 * self.num_warps // self.units

    @property
    def outputs_a_turn(self) -> int:
        """Outputs of a turn, one behind the other for a thread."""
        return self.outputs // (self.outputs_at_once * self.turns)

    @property
    def tile(self) -> tuple[int, int]:
        """Outputs and units of a step."""
        return self.outputs_at_once, self.units


@dataclasses.dataclass(frozen=True)
class FewTokens:
    """How the work is cut for up to `FEW_TOKENS` tokens.

    Attributes:
        gate_up: of the first launch; `outputs` are gates, and there are as many rows above.
        down: of the second launch.
        shared_outputs: gates of the shared expert a program of the first launch.
    """

    gate_up: Cut
    down: Cut
    shared_outputs: int = 1


Config = FewTokens | ManyTokens


def heuristic(
    cores: int, tokens: int, slots: int, width: int, hidden: int, gate_up: Matrix, down: Matrix
) -> FewTokens:
    """A configuration for a call's sizes on a device of so many cores.

    Args:
        cores: multiprocessors.
        tokens: M.
        slots: A.
        width: D.
        hidden: F.
        gate_up: how `gate_up_proj` is read.
        down: how `down_proj` is read.
    """
    first = _cut(cores, tokens * slots * hidden, 64, gate_up.units, gate_up.coded)
    second = _cut(cores, tokens * width, 128, slots * down.units, down.coded)
    return FewTokens(first, second, first.outputs_at_once)


def _cut(cores: int, outputs: int, widest: int, units: int, coded: bool) -> Cut:
    """Some outputs a program, for which inputs are read once, but all multiprocessors at work.

    Codes take so many instructions that outputs are met in turns.
    """
    wide = min(widest, _power_of_two(units))
    warps = max(1, wide // 32)
    count = MOST_OUTPUTS
    while count > 1 and outputs * warps < count * LEAST_WARPS * cores:
        count //= 2
    at_once = 32 * warps // wide
    count = max(count, at_once)
    return Cut(count, wide, warps, count // at_once if coded else 1)


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()
