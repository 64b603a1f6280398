"""What a kernel on Mosaic GPU does, by threads in NumPy, as `inside` wrote it down.

Threads that satisfy one condition at the kernel's end go in step; those of another one beside
them. What the copy engine brings comes at any time, and what was there before is gone when it is
asked for.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tests.pallas_kernels.inside import Array, Body, Env, Value
from tests.pallas_kernels.memory import Memory
from tests.pallas_kernels.streams import put_box, run_text

WARP = 32
# For the programs of a launch, one after the other.
AHEAD = (0.5, 0.95)


class Barrier:
    """One of shared memory, of phases."""

    def __init__(self, count: int):
        self._count, self._left, self._bytes, self.phase = count, count, 0, 0

    def arrive(self, count: int, more: int = 0) -> None:
        """So many threads, and that so many bytes more will come."""
        self._left, self._bytes = self._left - count, self._bytes + more
        assert self._left >= 0, "more threads arrive than are waited for"
        self._turn()

    def come(self, count: int) -> None:
        """So many bytes."""
        self._bytes -= count
        self._turn()

    def _turn(self) -> None:
        if self._left == self._bytes == 0:
            self._left, self.phase = self._count, self.phase + 1


def arrays_of(shapes: Sequence[Any], begin: int = 1024) -> tuple[list[Array], int]:
    """Shared memory that a launch asks for, in multiples of 1,024, and where it ends."""
    found = []
    for each in shapes:
        size = each.dtype.itemsize
        sizes = [math.prod(each.shape[axis + 1 :]) * size for axis in range(len(each.shape))]
        found.append(Array(begin, strides=tuple(sizes)))
        begin += -(-math.prod(each.shape) * size // 1024) * 1024
    return found, begin


def put_all(memory: Memory, address: int, arrays: Sequence[np.ndarray]) -> tuple[list[Array], int]:
    """Arrays one behind the other in the device's memory, and where they end."""
    found = []
    for array in arrays:
        memory.put(address, array)
        found.append(Array(np.uint64(address), array))
        address += -(-array.nbytes // 1024) * 1024
    return found, address


class Program:
    """Runs what was recorded.

    Args:
        body: of the kernel.
        number: of the program.
        threads: so many.
        memory: of the device.
        shared: of the program.
        ahead: how likely threads of the kernel's first condition, which ask, go on next. They have
            more steps than those that multiply, and come to wait for them only if it is near 1.
    """

    def __init__(
        self, body: Body, number: int, threads: int, memory: Memory, shared: Memory, ahead: float
    ):
        self._memory, self._shared, self._ahead = memory, shared, ahead
        self._random = random.Random(number)
        self._barriers: dict[int, Barrier] = {}
        self._coming: list[tuple[int, np.ndarray, int, int]] = []
        env = Env(number, np.arange(threads), {})
        running = []
        for index, step in enumerate(body):
            if step[0] == "when":
                _, condition, inner = step
                running.append(self._steps(inner, env.of(condition(env))))
            else:
                assert not running, f"step {index} is behind threads that part"
                for _ in self._steps([step], env):
                    pass
        self._run(running)

    def _run(self, running: list[Iterator[bool]]) -> None:
        """Until all are done; none may wait for what does not happen."""
        idle = 0
        while running:
            if self._coming and self._random.random() < 0.5:
                self._land(self._coming.pop(self._random.randrange(len(self._coming))))
                idle = 0
                continue
            chosen = running[0 if self._random.random() < self._ahead else -1]
            try:
                idle = 0 if next(chosen) else idle + 1
            except StopIteration:
                running.remove(chosen)
            assert idle < 1000, "all threads wait"
        assert not self._coming, "copies come when nobody is there any more"

    def _land(self, copy: tuple[int, np.ndarray, int, int]) -> None:
        address, data, line, barrier = copy
        if line:
            put_box(self._shared, address, data, line)
        else:
            self._shared.put(address, data)
        self._barriers[barrier].come(data.nbytes)

    def _steps(self, body: Body, env: Env) -> Iterator[bool]:
        """Whether something happened, step by step."""
        for kind, *step in body:
            if kind == "loop":
                yield from self._loop(env, *step)
            elif kind == "when":
                condition, inner = step
                mask = condition(env)
                if mask.any():
                    yield from self._steps(inner, env.of(mask))
            elif kind == "wait":
                barrier, parity = (_alike(each(env)) for each in step)
                while self._barriers[barrier].phase % 2 == parity:
                    yield False
            else:
                getattr(self, f"_{kind}")(env, *step)
                yield True

    def _loop(
        self,
        env: Env,
        name: int,
        begin: Value,
        end: Value,
        step: int,
        body: Body,
        names: list[int],
        starts: list[Value],
        made: list[Value],
    ) -> Iterator[bool]:
        for key, start in zip(names, starts, strict=True):
            env.values[key] = start(env)
        for index in range(_alike(begin(env)), _alike(end(env)), step):
            env.values[name] = np.full(len(env.threads), index)
            yield from self._steps(body, env)
            found = [value(env) for value in made]
            env.values |= dict(zip(names, found, strict=True))

    def _assembly(self, env: Env, text: str, operands: list[Any], names: list[int]) -> None:
        given = [each if isinstance(each, np.uint64) else each(env) for each in operands]
        # Addresses of the device's memory are alike in all threads.
        given = [np.uint64(_alike(each)) if each.dtype == np.uint64 else each for each in given]
        ran = run_text(text, given, self._shared, self._memory, env.threads, len(names))
        env.values |= {
            name: each.astype(np.int64) for name, each in zip(names, ran.results, strict=True)
        }
        for address, count in ran.barriers.items():
            self._barriers[address] = Barrier(count)
        for address, count in ran.arrivals.items():
            self._barriers[address].arrive(count)

    def _expect(self, env: Env, barrier: Value, count: Value) -> None:
        assert len(env.threads) == 1, "many threads say what comes"
        self._barriers[_alike(barrier(env))].arrive(1, _alike(count(env)))

    def _copy(self, env: Env, to: Value, source: Value, count: Value, barrier: Value) -> None:
        assert len(env.threads) == 1, "many threads ask for a copy"
        place, size = _alike(to(env)), _alike(count(env))
        assert place % 16 == size % 16 == 0, "the copy engine takes 16 bytes"
        at = np.arange(size // 16, dtype=np.uint64) * np.uint64(16) + source(env)
        self._ask(place, self._memory.load(at, 16).reshape(-1), 0, _alike(barrier(env)))

    def _copy_rows(
        self, env: Env, data: np.ndarray, count: int, width: int, *places: Value
    ) -> None:
        assert len(env.threads) == 1, "many threads ask for a copy"
        first, column, to, barrier = (_alike(each(env)) for each in places)
        assert to % 128 == 0, "the copy engine takes multiples of 128"
        box = np.ascontiguousarray(data[first : first + count, column : column + width])
        assert box.shape == (count, width), "a box is not in the array"
        self._ask(to, box, 4 * width, barrier)

    def _ask(self, to: int, data: np.ndarray, line: int, barrier: int) -> None:
        self._shared.drop(to, data.nbytes)
        self._coming.append((to, data, line, barrier))

    def _give_back(self, env: Env, barrier: Value) -> None:
        self._barriers[_alike(barrier(env))].arrive(len(env.threads) // WARP)
        self._shared.forget_readers()


def _alike(values: np.ndarray) -> int:
    """What all threads have."""
    [value] = np.unique(values)
    return int(value)
