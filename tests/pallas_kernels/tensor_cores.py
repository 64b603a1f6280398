"""Tensor cores that work beside the warps of a group, as PTX's `wgmma` tells them to: see `ptx`.

Products and sums are exact here, and rounded once; the instruction may be less so.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from tests.pallas_kernels.memory import Memory

GROUP = 128
_ROW, _ROWS = 128, 8  # bytes of a row of inputs, and rows that are described together


class TensorCores:
    """What they have under way, which no thread may touch.

    Args:
        shared: memory of the program.
    """

    def __init__(self, shared: Memory):
        self._shared = shared
        # Registers of groups of instructions: those that are read, and those that are written.
        self._groups: list[tuple[set[str], set[str]]] = []
        self._open: tuple[set[str], set[str]] = (set(), set())
        self._unfenced: set[str] = set()

    def do(
        self,
        operation: str,
        operands: list[str],
        value: Callable[[str], np.ndarray],
        registers: dict[str, np.ndarray],
    ) -> None:
        """An instruction.

        Args:
            operation: its name.
            operands: of it.
            value: of an operand that threads read.
            registers: of threads.
        """
        if operation == "wgmma.fence.sync.aligned":
            self._unfenced.clear()
        elif operation == "wgmma.commit_group.sync.aligned":
            self._groups.append(self._open)
            self._open = set(), set()
        elif operation == "wgmma.wait_group.sync.aligned":
            [left] = map(int, operands)
            assert not any(self._open), "instructions belong to no group yet"
            del self._groups[: len(self._groups) - left]
        else:
            self._multiply(operation, operands, value, registers)

    def written(self, name: str) -> None:
        """By a thread."""
        assert not any(name in each for group in self._all() for each in group), (
            f"{name} is written while tensor cores use it"
        )
        self._unfenced.add(name)

    def read(self, name: str) -> None:
        """By a thread."""
        assert not any(name in written for _, written in self._all()), (
            f"{name} is read while tensor cores write it"
        )

    def _all(self) -> list[tuple[set[str], set[str]]]:
        return [*self._groups, self._open]

    def _multiply(
        self,
        operation: str,
        operands: list[str],
        value: Callable[[str], np.ndarray],
        registers: dict[str, np.ndarray],
    ) -> None:
        form = r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.bf16\.bf16"
        found = re.fullmatch(form, operation)
        assert found, operation
        count = int(found[1])
        names, values = (each.strip("{}").split(", ") for each in operands[:2])
        assert len(names) == count // 2
        assert operands[4:] == ["1", "1", "0"], operands
        assert not self._unfenced & {*names, *values}, "registers are not fenced"
        continues = value(operands[3])
        assert continues.all() == continues.any()
        if continues.all():
            before = [registers[name] for name in names]
        else:
            before = [np.zeros_like(continues, np.uint32)] * len(names)
        product = self._product([value(name) for name in values], value(operands[2]), count)
        for index, (name, start) in enumerate(zip(names, before, strict=True)):
            column, (below, odd) = index // 4, divmod(index % 4, 2)
            # Lane 4 g + t of warp w has columns 2 t and 2 t + 1 of rows 16 w + g and 8 more.
            tile = product.reshape(-1, 4, 2, 8, count // 8, 4, 2)
            made = tile[:, :, below, :, column, :, odd].reshape(-1)
            total = made + start.view(np.float32).astype(np.float64)
            registers[name] = total.astype(np.float32).view(np.uint32)
        self._open[0].update(values)
        self._open[1].update(names)

    def _product(self, values: list[np.ndarray], described: np.ndarray, count: int) -> np.ndarray:
        """Of each group's rows with all inputs: float64 [G 64 N]."""
        pairs = [bfloat16_pairs(each).reshape(-1, 4, 8, 4, 2) for each in values]
        above, below = (np.stack([pairs[i], pairs[i + 2]], 3).reshape(-1, 4, 8, 16) for i in (0, 1))
        rows = np.stack([above, below], 2).reshape(-1, 64, 16)
        of_groups = described.reshape(-1, GROUP)
        assert (of_groups == of_groups[:, :1]).all(), "threads describe different inputs"
        columns = np.stack([self._inputs(int(each), count) for each in of_groups[:, 0]])
        return rows @ columns.swapaxes(1, 2)

    def _inputs(self, described: int, count: int) -> np.ndarray:
        """What a description is of: 16 inputs of each row, float64 [N 16]."""
        assert described >> 62 == 1, "pieces are in another order than that of 128 bytes"
        assert (described >> 46) & 0xFFFF == 0, "an offset is described"
        start, stride = (described & 0x3FFF) << 4, (described >> 32 & 0x3FFF) << 4
        assert start % _ROW < _ROW - 31
        row = np.arange(count)
        at = start + row // _ROWS * stride + row % _ROWS * _ROW
        at = at[:, None] + 16 * np.arange(2)
        places = (at ^ (at >> 7 & 7) << 4).reshape(-1)
        pieces = self._shared.load(places, 16, by_threads=False)
        return bfloat16_pairs(pieces.view(np.uint32).reshape(-1)).reshape(count, 16)


def bfloat16_pairs(words: np.ndarray) -> np.ndarray:
    """The two numbers in each word [N]: float64 [N 2]."""
    halves = words.view(np.uint16).astype(np.uint32) << np.uint32(16)
    return halves.view(np.float32).astype(np.float64).reshape(-1, 2)
