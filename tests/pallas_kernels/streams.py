"""Texts of streams run by all their threads, and codes as the copy engine leaves them."""

from __future__ import annotations

import re
from collections import Counter
from typing import NamedTuple

import numpy as np

from tests.pallas_kernels.memory import Memory
from tests.pallas_kernels.ptx import Threads


class Ran(NamedTuple):
    """What a text did.

    Attributes:
        results: of all threads.
        conflicts: accesses with conflicts.
        arrivals: how many there were at each address.
        barriers: of how many threads each address waits.
    """

    results: list[np.ndarray]
    conflicts: set[str]
    arrivals: Counter[int]
    barriers: dict[int, int]


def run_text(
    text: str,
    operands: list,
    shared: Memory,
    memory: Memory,
    threads: int | np.ndarray,
    results: int,
) -> Ran:
    """A text by all its threads.

    Args:
        text: whose placeholders are results, and then operands.
        operands: alike in all threads, or an array; addresses of the device's memory are uint64.
        shared: memory of the program.
        memory: of the device.
        threads: that run it: numbers, or how many from thread 0 on.
        results: so many words.
    """
    numbers = np.arange(threads) if isinstance(threads, int) else threads
    count = results + len(operands)
    declared, registers = [], {}
    for index in range(count):
        kind = "b32"
        if index >= results:
            value = operands[index - results]
            if isinstance(value, np.uint64):
                kind = "b64"
                registers[f"%g{index}"] = np.full(len(numbers), value, np.uint64)
            else:
                each = np.broadcast_to(np.asarray(value, np.uint32), numbers.shape)
                registers[f"%g{index}"] = each.copy()
        declared.append(f".reg .{kind} %g{index};")
    text = re.sub(r"\$(\d+)", r"%g\1", text)
    text = "\n".join([*declared, text])
    made = Threads(numbers, (), registers, memory, shared).run(text)
    found = [made.registers[f"%g{index}"] for index in range(results)]
    return Ran(found, made.conflicts, made.arrivals, made.barriers)


def put_box(shared: Memory, address: int, words: np.ndarray, line: int) -> None:
    """Words of rows, at an address whose bits say the order of pieces."""
    pieces = words.reshape(-1, 4)
    at = address + 16 * np.arange(len(pieces))
    places = at ^ (at >> 7 & line // 16 - 1) << 4
    moved = np.empty_like(pieces)
    moved[(places - address) // 16] = pieces
    shared.put(address, moved)
