"""How the work of the Triton kernels is cut."""

from __future__ import annotations

import dataclasses

from jax.experimental import pallas as pl

from ..tuning import varied
from .operands import Shape

FEW_ROWS = 4
SOME_ROWS = 64
# From so many on, making a matrix in bfloat16 is the smaller part of its product.
UNPACKED_ROWS = 256
# Units that are multiplied together by the kernel of some rows.
BLOCK_UNITS = 4
# Most columns that it multiplies at once: with twice as many, sums leave the registers, and inputs
# need 131 KiB of shared memory, where some devices have 99.
MOST_COLUMNS = 128
# From so many outputs on, a launch that orders inputs costs less than it saves.
MANY_OUTPUTS = 1 << 16
# Warps of the kernel of few rows that keep a multiprocessor busy, and most outputs of a program.
LEAST_WARPS, MOST_OUTPUTS = 6, 4


@dataclasses.dataclass(frozen=True)
class FewRows:
    """How the work is cut for up to `FEW_ROWS` rows.

    Attributes:
        outputs: outputs a program, a power of two, at least `outputs_at_once`.
        units: units of each that are read at once, one a thread: a power of two.
        num_warps: warps a program.
        abreast: whether inputs, of 16 bits, are brought in the order that `abreast` tells of, by a
            launch of its own. The same for all matrices of a call.
        awaited: whether no product begins before all codes of a step have been asked for, see
            `awaited`.
    """

    outputs: int = 4
    units: int = 64
    num_warps: int = 2
    abreast: bool = False
    awaited: bool = True

    @property
    def outputs_at_once(self) -> int:
        """Outputs whose units are read at once, by a thread each."""
        return 32 * self.num_warps // self.units


@dataclasses.dataclass(frozen=True)
class SomeRows:
    """How the work is cut for up to `SOME_ROWS` rows.

    Attributes:
        rows: rows a program, a power of two; together with `tile.copies` at least 8 columns.
        outputs: outputs a program, a power of two, at least 16 a warp.
        splits: into how many parts the inputs are cut; parts are summed by a further launch.
        num_warps: warps a program, one or two. Of four, tensor cores would take codes out of
            shared memory only.
        num_stages: see `_compat.triton_call`.
        blocks: of `BLOCK_UNITS`, that are multiplied in one iteration.
    """

    rows: int = 16
    outputs: int = 32
    splits: int = 1
    num_warps: int = 2
    num_stages: int = 3
    blocks: int = 1

    @property
    def units(self) -> int:
        """Units of an iteration."""
        return BLOCK_UNITS * self.blocks


@dataclasses.dataclass(frozen=True)
class ManyRows:
    """How the work is cut for more rows.

    Attributes:
        rows: rows a program, a power of two.
        outputs: outputs a program, a power of two.
        units: units that are decoded at once, a power of two.
        num_warps: warps a program.
        num_stages: see `_compat.triton_call`.
    """

    rows: int = 128
    outputs: int = 128
    units: int = 2
    num_warps: int = 8
    num_stages: int = 3


@dataclasses.dataclass(frozen=True)
class Unpacked:
    """How the work is cut where a matrix is made in bfloat16 first.

    Attributes:
        outputs: outputs a program, a power of two.
        units: units of each, a power of two.
        num_warps: warps a program.
    """

    outputs: int = 16
    units: int = 16
    num_warps: int = 4


Config = FewRows | SomeRows | ManyRows | Unpacked
KINDS = (FewRows, SomeRows, ManyRows, Unpacked)


def heuristic(cores: int, shape: Shape, outputs: int, *, beside: bool = False) -> Config:
    """A configuration for a call's sizes on a device of so many cores.

    Args:
        cores: multiprocessors.
        shape: of one of its products.
        outputs: of all matrices of the call.
        beside: whether the call has matrices without codes.
    """
    rows = shape.rows
    if rows <= FEW_ROWS:
        config = _few_rows(cores, outputs, shape.units)
        # With what such a matrix needs, all codes would not fit into registers: on an H200, the
        # delta net's inputs take 23.2 us in place of 17.5.
        return dataclasses.replace(config, awaited=rows < FEW_ROWS or not beside)
    if rows <= SOME_ROWS:
        return _some_rows(cores, shape, outputs)
    return ManyRows() if rows < UNPACKED_ROWS else Unpacked()


def others(config: Config) -> list[Config]:
    """What may be tried in place of a heuristic's configuration."""
    if isinstance(config, FewRows):
        halves = FewRows(config.outputs, config.units // 2, config.num_warps // 2)
        near = [
            *varied(config, outputs=(1, 2, 4, 8), abreast=(False, True), awaited=(False, True)),
            halves,
        ]
        return [c for c in near if c.num_warps and c.outputs >= max(1, c.outputs_at_once)]
    if isinstance(config, SomeRows):
        return varied(
            config, outputs=(32, 64), splits=(1, 2, 4), num_stages=(2, 4), blocks=(1, 2, 4)
        )
    return [
        ManyRows(),
        ManyRows(128, 128, 4, 8, 3),
        *(Unpacked(*sizes) for sizes in ((16, 16, 4), (32, 16, 4), (16, 64, 8))),
    ]


def without_codes(config: Config, rows: int) -> Config:
    """The same cut for a matrix of numbers.

    Its bytes are several times those of codes, so that a program of few rows takes fewer outputs.
    """
    if isinstance(config, FewRows):
        return dataclasses.replace(config, outputs=max(1, FEW_ROWS // rows), abreast=False)
    return config


def _few_rows(cores: int, outputs: int, units: int) -> FewRows:
    """Some outputs a program, for which inputs are read once, but all multiprocessors at work.

    More would read inputs less often, but in a model each launch is another kernel, whose
    instructions multiprocessors fetch anew, at about 8 cycles each: long code takes its time.
    """
    width = min(128, pl.next_power_of_2(units))
    warps = max(1, width // 32)
    count = MOST_OUTPUTS
    while count > 1 and outputs * warps < count * LEAST_WARPS * cores:
        count //= 2
    return FewRows(max(count, 32 * warps // width), width, warps, outputs >= MANY_OUTPUTS)


def _some_rows(cores: int, shape: Shape, outputs: int) -> SomeRows:
    """Two blocks at once, if rows are few; parts of the inputs that keep the device at work.

    At 3 bits, each group of a block is a product of its own with all inputs of it.
    """
    copies = max(1, BLOCK_UNITS // shape.group_units) if shape.bits == 3 else 1
    rows = min(max(8, pl.next_power_of_2(shape.rows)), MOST_COLUMNS // copies)
    columns = rows * copies
    # On an H200, the head of 248,320 outputs at 4 bits takes 261 us with 32 rows in place of 338.
    # At 8 bits its program would spill, and need 66 KiB of shared memory.
    if outputs >= MANY_OUTPUTS and 16 < columns <= 32 and shape.bits < 8:
        return SomeRows(rows, outputs=64, blocks=2)
    config = SomeRows(rows, blocks=2 if columns <= 16 else 1)
    programs, steps = pl.cdiv(outputs, config.outputs), pl.cdiv(shape.units, config.units)
    splits = 1
    while 2 * splits * programs <= 3 * cores and 4 * splits <= steps:
        splits *= 2
    return dataclasses.replace(config, splits=splits)
