"""What a kernel on Mosaic GPU says, written down: see `program`, which runs it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from pallas_kernels.mosaic import Inside

Value = Callable[["Env"], Any]
Body = list[tuple[Any, ...]]


@dataclasses.dataclass
class Env:
    """What threads see.

    Attributes:
        program: number of theirs.
        threads: their numbers.
        values: of each name, arrays of all threads.
    """

    program: int
    threads: np.ndarray
    values: dict[int, np.ndarray]

    def of(self, mask: np.ndarray) -> Env:
        """That of some threads."""
        values = {name: value[mask] for name, value in self.values.items()}
        return Env(self.program, self.threads[mask], values)


@dataclasses.dataclass(frozen=True)
class Array:
    """An array in a memory.

    Attributes:
        address: where it begins; np.uint64 in the device's memory.
        data: of what the copy engine takes boxes of.
        strides: bytes of each axis, of shared memory that boxes come to.
    """

    address: int | np.uint64
    data: np.ndarray | None = None
    strides: tuple[int, ...] = ()


class Recorder(Inside):
    """Writes down what a kernel says, of what those of `mosaic` make a program of."""

    def __init__(self) -> None:
        self.body: Body = []
        self._names = 0
        self.thread: Value = lambda env: env.threads.astype(np.int64)
        self.program: Value = lambda env: np.full(len(env.threads), env.program)

    def number(self, value: int) -> Value:
        return lambda env: np.full(len(env.threads), value)

    def _value(self, value: Any) -> Value:
        return self.number(value) if isinstance(value, int) else value

    def _made(self, function: Callable[..., Any], *values: Any) -> Value:
        given = [self._value(each) for each in values]
        return lambda env: function(*(each(env) for each in given))

    def sum(self, *values: Any) -> Value:
        return self._made(lambda *each: sum(each), *values)

    def product(self, a: Any, b: Any) -> Value:
        return self._made(lambda a, b: a * b, a, b)

    def divided(self, a: Any, b: Any) -> tuple[Value, Value]:
        return self._made(lambda a, b: a // b, a, b), self._made(lambda a, b: a % b, a, b)

    def less(self, a: Any, b: Any) -> Value:
        return self._made(lambda a, b: a < b, a, b)

    def both(self, a: Any, b: Any) -> Value:
        return self._made(np.logical_and, a, b)

    def select(self, condition: Any, a: Any, b: Any) -> Value:
        return self._made(np.where, condition, a, b)

    def address(self, ref: Array) -> Any:
        return ref.address

    def row_address(self, ref: Array, row: Any, size: int) -> Value:
        return self._made(lambda row: np.uint64(ref.address) + (row * size).astype(np.uint64), row)

    def shared_address(self, ref: Array, *offsets: Any) -> Value:
        return self.sum(int(ref.address), *offsets)

    def assembly(self, text: str, *operands: Any, results: int = 0) -> list[Value]:
        names, found = self._new(results)
        self.body.append(("assembly", text, [self._operand(each) for each in operands], names))
        return found

    def _operand(self, value: Any) -> Any:
        return value if isinstance(value, np.uint64) else self._value(value)

    def _new(self, count: int) -> tuple[list[int], list[Value]]:
        names = list(range(self._names, self._names + count))
        self._names += count
        return names, [lambda env, name=name: env.values[name] for name in names]

    def wait(self, barrier: Any, parity: Any) -> None:
        self.body.append(("wait", self._value(barrier), self._value(parity)))

    def expect(self, barrier: Any, count: Any) -> None:
        self.body.append(("expect", self._value(barrier), self._value(count)))

    def copy(self, to: Any, source: Any, count: Any, barrier: Any) -> None:
        self.body.append(("copy", *map(self._value, (to, source, count, barrier))))

    def copy_rows(self, source: Array, rows: Any, columns: Any, to: Any, barrier: Any) -> None:
        (first, count), (column, width) = rows, columns
        array, (stage, box, row) = to
        bars, which = barrier
        at = self.sum(
            int(array.address), self.product(stage, array.strides[0]), box * array.strides[1]
        )
        at = self.sum(at, row * array.strides[2])
        bar = self.shared_address(bars, self.product(which, 8))
        place = self._value(first), self._value(column), at, bar
        self.body.append(("copy_rows", source.data, count, width, *place))

    def give_back(self, barrier: Any) -> None:
        self.body.append(("give_back", self._value(barrier)))

    @contextlib.contextmanager
    def when(self, condition: Any) -> Iterator[None]:
        with self._inner() as body:
            yield
        self.body.append(("when", condition, body))

    @contextlib.contextmanager
    def over(self, begin: Any, end: Any, step: int = 1) -> Iterator[Value]:
        [name], [index] = self._new(1)
        with self._inner() as body:
            yield index
        self.body.append(
            ("loop", name, self._value(begin), self._value(end), step, body, [], [], [])
        )

    def repeated(
        self, count: int, values: Sequence[Any], body: Callable[..., Sequence[Any]]
    ) -> list[Value]:
        [name], [index] = self._new(1)
        names, given = self._new(len(values))
        with self._inner() as inner:
            made = body(index, *given)
        starts = [self._value(each) for each in values]
        bounds = self.number(0), self.number(count), 1
        self.body.append(("loop", name, *bounds, inner, names, starts, made))
        return given

    @contextlib.contextmanager
    def _inner(self) -> Iterator[Body]:
        outer, self.body = self.body, []
        inner = self.body
        yield inner
        self.body = outer
