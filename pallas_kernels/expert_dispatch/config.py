"""How the work of the kernels is cut."""

from __future__ import annotations

import dataclasses

from .many_tokens_config import ManyTokens

FEW_TOKENS = 64
# Warps on a multiprocessor: what keeps it busy, and what it holds at a time.
LEAST_WARPS, MOST_WARPS = 6, 64


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
    shared_outputs: int = 4


Config = FewTokens | ManyTokens


def heuristic(
    cores: int, tokens: int, slots: int, width: int, hidden: int, units: int, hidden_units: int
) -> FewTokens:
    """A configuration for a call's sizes on a device of so many cores.

    Args:
        cores: multiprocessors.
        tokens: M.
        slots: A.
        width: D.
        hidden: F.
        units: units of a row of `gate_up_proj`.
        hidden_units: units of a row of `down_proj`.
    """
    gate_up = _cut(cores, tokens * slots * hidden, 64, units, 8)
    down = _cut(cores, tokens * width, 128, slots * hidden_units, 8)
    return FewTokens(gate_up, down, max(gate_up.outputs_at_once, gate_up.outputs // 2))


def _cut(cores: int, outputs: int, widest: int, units: int, most: int) -> Cut:
    """Many outputs a program, for which inputs are read once, but all multiprocessors at work."""
    wide = min(widest, _power_of_two(units))
    warps = max(1, wide // 32)
    count = most
    while count > 1 and outputs * warps < count * LEAST_WARPS * cores:
        count //= 2
    return Cut(max(count, 32 * warps // wide), wide, warps)


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()
