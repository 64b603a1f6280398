"""How the work of the kernels is cut."""

from __future__ import annotations

import dataclasses

from jax.experimental import pallas as pl

from ..dequant_matmul.config import SomeRows
from ..tuning import varied
from .many_tokens_config import ManyTokens

FEW_TOKENS = 64
# Where programs have some columns of a token: those of a warp, eight a thread, 16 bytes of
# bfloat16. Programs of few tokens are of one warp, so that there are enough of them, and of more
# tokens of four.
COLUMNS, WARPS = 256, 4
# From so many tokens on, those that share an expert share its tiles. On an H200, 8 of 256 experts
# a token, this takes 115 us in place of 175 at 32 tokens, 79 in place of 84 at 16; at 8 nothing is
# gained.
SHARING_TOKENS = 12
# Warps that keep a multiprocessor busy, and most outputs of a program.
LEAST_WARPS, MOST_OUTPUTS = 6, 8


@dataclasses.dataclass(frozen=True)
class Cut:
    """How a product is cut.

    Attributes:
        outputs: rows of the matrix a program, a power of two, at least `outputs_at_once`.
        units: units of each that are read at once, one a thread: a power of two.
        num_warps: warps a program.
        awaited: see `dequant_matmul.config.FewRows`.
    """

    outputs: int = 4
    units: int = 64
    num_warps: int = 2
    awaited: bool = False

    @property
    def outputs_at_once(self) -> int:
        """Outputs whose units are read at once, by a thread each."""
        return 32 * self.num_warps // self.units

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
        abreast: whether codes meet tokens that were brought in the order of
            `dequant_matmul.abreast`, by a launch of its own. What lies between the two launches is
            in that order always, if codes meet it.
    """

    gate_up: Cut
    down: Cut
    shared_outputs: int = 1
    abreast: bool = False


@dataclasses.dataclass(frozen=True)
class SomeTokens:
    """How the work is cut where tokens that share an expert share its tile.

    Warps and stages of a launch are those of its routed experts' part.

    Attributes:
        gate_up: of the first launch; `outputs` are gates, and there are as many rows above. `rows`
            is most slots that share a tile, the same in both launches.
        down: of the second launch.
        shared: of the shared expert's part in the first launch; `rows` are tokens.
        shared_down: of its part in the second launch.
    """

    gate_up: SomeRows
    down: SomeRows
    shared: SomeRows
    shared_down: SomeRows


Config = FewTokens | SomeTokens | ManyTokens


def heuristic(
    cores: int,
    tokens: int,
    slots: int,
    width: int,
    hidden: int,
    units: int,
    hidden_units: int,
    *,
    bits: int,
) -> FewTokens:
    """A configuration for a call's sizes on a device of so many cores; not `abreast`.

    Args:
        cores: multiprocessors.
        tokens: M.
        slots: A.
        width: D.
        hidden: F.
        units: units of a row of `gate_up_proj`.
        hidden_units: units of a row of `down_proj`.
        bits: of a code of `gate_up_proj`; 0 without codes.
    """
    # One warp a program, if there are programs enough: its code is half as long.
    gate_up = _cut(cores, tokens * slots * hidden, 64 if tokens == 1 else 32, units)
    # On an H200, qwen3-30b-a3b takes 8.7 us in place of 16.5, and qwen3.6-35b-a3b 8.4 in place of
    # 8.9. Several tokens take 1 to 3 us more so, the second launch 0.6, and at 8 bits too few
    # programs would reside.
    gate_up = dataclasses.replace(gate_up, awaited=tokens == 1 and 0 < bits < 8)
    down = _cut(cores, tokens * width, 128, slots * hidden_units)
    # The shared expert's codes may have more bits, which are longer code: with half as many gates
    # as a slot's, all programs of one token take 12 us on an H200, with a quarter 7.6.
    return FewTokens(gate_up, down, max(gate_up.outputs_at_once, gate_up.outputs // 4))


def joint(copies: int, copies_below: int) -> SomeTokens:
    """A configuration where tokens share tiles.

    Programs are of two warps, which read the same inputs: less of them, and as many programs as
    registers let reside. Tensor cores take eight columns, of which each copy of the inputs needs
    its own.

    Args:
        copies: of what `gate_up_proj` meets, see `tile.copies`.
        copies_below: of what `down_proj` meets.
    """
    rows = 8 // min(copies, copies_below)
    own = SomeRows(8)
    blocks, blocks_below = (2 if rows * count <= 16 else 1 for count in (copies, copies_below))
    return SomeTokens(
        SomeRows(rows, blocks=blocks),
        SomeRows(rows, 64, blocks=blocks_below),
        own,
        own,
    )


def others(
    config: FewTokens | SomeTokens, *kinds: FewTokens | SomeTokens
) -> list[FewTokens | SomeTokens]:
    """What may be tried in place of a heuristic's configuration.

    Args:
        config: the heuristic's.
        kinds: one of each other kind that the call may have.
    """
    if isinstance(config, SomeTokens):
        stages = varied(config.gate_up, num_stages=(2, 4), blocks=(1, 2, 4))
        down = varied(config.down, outputs=(32, 64, 128))
        return [*kinds, *varied(config, gate_up=stages, down=down)]
    outputs, both = (2, 4, 8, 16), (False, True)
    firsts, seconds = (
        [c for c in varied(cut, outputs=outputs, awaited=both) if c.outputs >= c.outputs_at_once]
        for cut in (config.gate_up, config.down)
    )
    found = varied(config, gate_up=firsts, down=seconds)
    shared = (config.gate_up.outputs_at_once, config.gate_up.outputs)
    near = [
        each
        for each in (*found, *varied(config, shared_outputs=shared))
        if each.shared_outputs <= each.gate_up.outputs
    ]
    return [*kinds, *near]


def _cut(cores: int, outputs: int, widest: int, units: int) -> Cut:
    """Some outputs a program, for which inputs are read once, but all multiprocessors at work."""
    wide = min(widest, pl.next_power_of_2(units))
    warps = max(1, wide // 32)
    count = MOST_OUTPUTS
    while count > 1 and outputs * warps < count * LEAST_WARPS * cores:
        count //= 2
    return Cut(max(count, 32 * warps // wide), wide, warps)
