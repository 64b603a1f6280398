"""PTX, instruction by instruction in NumPy, by many threads at once.

Only what kernels here write is known; all else is refused. Threads go in step, so that a barrier
has nothing to wait for; instead, what threads stored cannot be read before it.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Callable, Mapping, Sequence

import ml_dtypes
import numpy as np

from tests.pallas_kernels.memory import Memory
from tests.pallas_kernels.tensor_cores import TensorCores, bfloat16_pairs

WARP, GROUP = 32, 128
_KINDS = {"b16": np.uint16, "b32": np.uint32, "f32": np.uint32, "b64": np.uint64, "pred": np.bool_}
_INSTRUCTION = re.compile(r"(?:@(%\w+) )?([\w.:]+) ?(.*);")
_OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+")
# What is for memory that is ordered here anyway.
_NOTHING = ("griddepcontrol.wait", "fence.mbarrier_init.release.cluster")


class Threads:
    """Threads that run a text together.

    Args:
        numbers: of the threads in their program, consecutive: int [T].
        operands: what placeholders stand for, alike in all threads: 64 bits where they are NumPy's.
        registers: arrays [T] that some have to begin with.
        memory: of the device.
        shared: memory of the program.
        given_back: address and size of what no thread reads once threads arrive at a barrier.

    Attributes:
        registers: of all threads, as bits.
        arrivals: how many there were at each address.
        barriers: of how many threads each address waits.
        conflicts: accesses to shared memory whose threads need one bank for different words.
    """

    def __init__(
        self,
        numbers: np.ndarray,
        operands: Sequence[int | np.uint64] = (),
        registers: Mapping[str, np.ndarray] | None = None,
        memory: Memory | None = None,
        shared: Memory | None = None,
        given_back: Sequence[tuple[int, int]] = (),
    ):
        self.registers = dict(registers or {})
        self.arrivals: collections.Counter[int] = collections.Counter()
        self.barriers: dict[int, int] = {}
        self.conflicts: set[str] = set()
        self._count = len(numbers)
        self._memory, self._shared = memory or Memory(0, 0), shared or Memory(0, 0)
        self._given_back = given_back
        self._given = {f"${index}": self._all(each) for index, each in enumerate(operands)}
        self._given["%tid.x"] = numbers.astype(np.uint32)
        self._given["%laneid"] = self._given["%tid.x"] % np.uint32(WARP)
        self._numbers = np.asarray(numbers)
        self._warps = self._numbers // WARP
        self._kinds: dict[str, str] = {}
        self._active = np.ones(self._count, bool)
        self._gone: dict[str, np.ndarray] = {}
        # Whether warps have waited for their threads since these read shared memory.
        self._warps_wait = True
        self._cores = TensorCores(self._shared)

    def run(self, text: str) -> Threads:
        """All of it; gives itself back."""
        with np.errstate(all="ignore"):
            for line in text.splitlines():
                if line in ("{", "}"):
                    continue
                if declared := re.fullmatch(r"\.reg \.(\w+) (%\w+);", line):
                    kind, name = declared.groups()
                    self._kinds[name] = kind
                elif line.endswith(":"):
                    self._active |= self._gone.pop(line[:-1], False)
                else:
                    self._do(line)
        assert not self._gone, f"no label follows of {list(self._gone)}"
        self._memory.publish()
        return self

    def _do(self, line: str) -> None:
        found = _INSTRUCTION.fullmatch(line)
        assert found, f"{line!r} is no instruction"
        guard, operation, rest = found.groups()
        operands = _OPERAND.findall(rest)
        mask = self._active & self.registers[guard] if guard else self._active
        if operation in _MADE:
            assert guard is None, f"{line!r} is not expected to have a predicate"
            result, *values = operands
            self._set(result, _MADE[operation](*map(self._value, values)))
        elif operation.startswith("mma.sync."):
            assert mask.all(), "threads are missing at tensor cores"
            self._multiply(operation, *operands)
        elif operation.startswith("wgmma."):
            assert mask.all(), "threads are missing at tensor cores"
            self._cores.do(operation, operands, self._value, self.registers)
        elif operation.startswith("setmaxnreg."):
            assert mask.all() and len(mask) % GROUP == 0, "threads of a group are missing"
            assert int(operands[0]) % 8 == 0
        elif operation == "fence.proxy.async.shared::cta":
            self._shared.tell()
        elif operation.startswith("stmatrix."):
            assert mask.all(), "threads are missing"
            self._store_turned(operation, *operands)
        elif operation in ("cp.async.cg.shared.global", "cp.async.ca.shared.global"):
            to, source, size = operands
            data = self._memory.load(self._address(source)[mask], int(size))
            self._shared.store(self._address(to)[mask], data)
        elif operation == "cp.async.mbarrier.arrive.noinc.shared.b64":
            self.arrivals.update(self._address(operands[0])[mask].tolist())
            self._shared.publish()
        elif operation.startswith(("ld.", "st.")):
            self._move(operation, operands, mask)
        elif operation == "bra":
            [label] = operands
            self._gone[label] = self._gone.get(label, False) | mask
            self._active = self._active & ~mask
        elif operation == "bar.sync":
            name, count = (np.unique(self._value(each)[mask]) for each in operands)
            assert len(name) == 1, f"threads wait at {name}"
            assert count == mask.sum(), f"{count} threads are waited for, of {mask.sum()}"
            self._shared.publish()
        elif operation == "bar.warp.sync":
            assert operands == ["0xffffffff"]
            assert mask.all()
            self._warps_wait = True
            self._shared.publish_to_owners()
        elif operation == "mbarrier.init.shared.b64":
            address, count = operands
            [place] = np.unique(self._address(address)[mask])
            self.barriers[int(place)] = int(count)
        elif operation in _NOTHING:
            pass
        elif operation == "mbarrier.arrive.shared.b64":
            self._arrive(operands[1], mask)
        else:
            raise NotImplementedError(line)

    def _arrive(self, address: str, mask: np.ndarray) -> None:
        assert self._warps_wait, "a warp arrives for threads that may yet read"
        self.arrivals.update(self._address(address)[mask].tolist())
        for begin, size in self._given_back:
            self._shared.drop(begin, size)

    def _move(self, operation: str, operands: list[str], mask: np.ndarray) -> None:
        """A load or a store, of one word or more."""
        found = re.fullmatch(
            r"(ld|st)\.(shared|global)(\.nc)?(?:\.v([24]))?\.[buf](16|32)", operation
        )
        assert found, f"{operation} is not known"
        way, space, constant, count, bits = found.groups()
        assert (way, space) != ("ld", "global") or constant, f"{operation} is not known"
        memory = self._shared if space == "shared" else self._memory
        dtype, each = np.dtype(f"u{int(bits) // 8}"), int(bits) // 8
        address, registers = operands if way == "st" else operands[::-1]
        names = re.split(r", ", registers.strip("{}"))
        assert len(names) == int(count or 1), f"{operation} of {names}"
        addresses = self._address(address)[mask]
        if space == "shared" and mask.all() and _conflict(addresses, each * len(names)):
            self.conflicts.add(operation)
        if way == "st":
            values = [self._value(name)[mask] for name in names]
            assert all(value.dtype == dtype for value in values)
            data = np.ascontiguousarray(np.stack(values, 1)).view(np.uint8)
            memory.store(addresses, data, self._warps[mask], self._numbers[mask])
            return
        if space == "shared":
            self._warps_wait = False
        who = {"owners": self._warps[mask], "threads": self._numbers[mask]}
        data = memory.load(addresses, each * len(names), **who).view(dtype)
        for index, name in enumerate(names):
            result = np.zeros(self._count, _KINDS[self._kinds[name]])
            result[mask] = data[:, index]
            self._set(name, result)

    def _store_turned(self, operation: str, address: str, registers: str) -> None:
        """Squares of eight, whose columns become rows at addresses that eight lanes give."""
        assert operation == "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16", operation
        addresses = self._address(address).reshape(-1, 4, 8)
        for square, name in enumerate(registers.strip("{}").split(", ")):
            # Lane 4 g + t has elements 2 t and 2 t + 1 of row g.
            values = self._value(name).view(np.uint16).reshape(-1, 8, 8)
            rows = np.ascontiguousarray(values.swapaxes(1, 2)).reshape(-1, 8).view(np.uint8)
            own = addresses[:, square].reshape(-1)
            if _conflict(own, 16):
                self.conflicts.add(operation)
            # Whichever lane writes it.
            self._shared.store(own, rows, np.repeat(self._warps[::WARP], 8))

    def _multiply(self, operation: str, *operands: str) -> None:
        """Products and sums are exact here, and rounded once; the instruction may be less so."""
        assert operation == "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", operation
        names, *values = (each.strip("{}").split(", ") for each in operands)
        # Lane 4 g + t has elements 2 t and 2 t + 1 of row g, or of column g of what is multiplied.
        a, b = (
            [bfloat16_pairs(self._value(name)).reshape(-1, 8, 8) for name in each]
            for each in values[:2]
        )
        upper, lower = np.concatenate(a[0::2], 2), np.concatenate(a[1::2], 2)
        product = np.concatenate([upper, lower], 1) @ np.concatenate(b, 2).swapaxes(1, 2)
        halves = product[:, :8].reshape(-1, 2), product[:, 8:].reshape(-1, 2)
        for index, (name, start) in enumerate(zip(names, values[2], strict=True)):
            total = halves[index // 2][:, index % 2] + _float(self._value(start))
            self._set(name, _bits(total))

    def _address(self, operand: str) -> np.ndarray:
        register, _, offset = operand.strip("[]").partition("+")
        address = self._value(register)
        return address + address.dtype.type(int(offset or 0))

    def _value(self, operand: str) -> np.ndarray:
        if operand in self._given:
            return self._given[operand]
        if operand.startswith("{"):
            lower, upper = (self._value(each) for each in operand.strip("{}").split(", "))
            return lower.astype(np.uint64) | upper.astype(np.uint64) << np.uint64(32)
        if operand.startswith("%"):
            self._cores.read(operand)
            assert operand in self.registers, f"nothing is in {operand} yet"
            return self.registers[operand]
        if operand.startswith("0f"):
            return self._all(int(operand[2:], 16))
        return self._all(int(operand, 0))

    def _set(self, name: str, value: np.ndarray) -> None:
        assert value.dtype == _KINDS[self._kinds[name]], f"{name} is {self._kinds[name]}"
        self._cores.written(name)
        self.registers[name] = value

    def _all(self, value: int | np.uint64) -> np.ndarray:
        return np.full(self._count, value, np.uint64 if isinstance(value, np.uint64) else np.uint32)


def _conflict(addresses: np.ndarray, size: int) -> bool:
    """Whether threads that go together, as many as have 128 bytes, need a bank for more words."""
    words = addresses.reshape(-1, min(WARP, 128 // size))[..., None] // 4 + np.arange(-(-size // 4))
    for together in words.reshape(len(words), -1):
        _, counts = np.unique(np.unique(together) % 32, return_counts=True)
        if counts.max() > 1:
            return True
    return False


def _float(bits: np.ndarray) -> np.ndarray:
    return bits.view(np.float32).astype(np.float64)


def _bits(number: np.ndarray) -> np.ndarray:
    return number.astype(np.float32).view(np.uint32)


def _bfloat16(number: np.ndarray) -> np.ndarray:
    return number.astype(np.float32).astype(ml_dtypes.bfloat16)


def _pairs_fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    exact = bfloat16_pairs(a) * bfloat16_pairs(b) + bfloat16_pairs(c)
    return _bfloat16(exact).view(np.uint32).reshape(-1)


def _pairs_mul(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return _bfloat16(bfloat16_pairs(a) * bfloat16_pairs(b)).view(np.uint32).reshape(-1)


def _prmt(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """Four bytes of eight; a selector has four bits for each, the lowest byte's first."""
    both = np.stack([a, b], 1).view(np.uint8)
    which = selector[:, None] >> 4 * np.arange(4, dtype=np.uint32) & np.uint32(7)
    assert not (selector[:, None] >> 4 * np.arange(4, dtype=np.uint32) & np.uint32(8)).any()
    return np.take_along_axis(both, which.astype(np.intp), 1).copy().view(np.uint32).reshape(-1)


def _lop3(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: np.ndarray) -> np.ndarray:
    # What the tables say of (a & b) | c, and of (a & b) ^ c.
    [which] = set(table.tolist())
    return a & b | c if which == 0xEA else a & b ^ {0x6A: c}[which]


# What makes one result of the bits of others.
_MADE: dict[str, Callable[..., np.ndarray]] = {
    "mov.b32": lambda a: a,
    "mov.u32": lambda a: a,
    "mov.f32": lambda a: a,
    "mov.b64": lambda a: a,
    # From the first lane of a warp.
    "shfl.sync.idx.b32": lambda a, *_: np.repeat(a[::WARP], WARP),
    "add.u32": lambda a, b: a + b,
    "sub.u32": lambda a, b: a - b,
    "mul.lo.u32": lambda a, b: a * b,
    "mad.lo.u32": lambda a, b, c: a * b + c,
    "mad.wide.u32": lambda a, b, c: a.astype(np.uint64) * b + c,
    "div.u32": lambda a, b: a // b,
    "rem.u32": lambda a, b: a % b,
    "shl.b32": lambda a, n: a << n,
    "shr.u32": lambda a, n: a >> n,
    "and.b32": lambda a, b: a & b,
    "xor.b32": lambda a, b: a ^ b,
    "bfe.u32": lambda a, first, count: a >> first & (np.uint32(1) << count) - np.uint32(1),
    "lop3.b32": _lop3,
    "min.u32": np.minimum,
    "prmt.b32": _prmt,
    "selp.b32": lambda a, b, condition: np.where(condition, a, b),
    "setp.eq.u32": lambda a, b: a == b,
    "setp.ne.u32": lambda a, b: a != b,
    "setp.ge.u32": lambda a, b: a >= b,
    "setp.lt.u32": lambda a, b: a < b,
    "and.pred": lambda a, b: a & b,
    "setp.lt.s32": lambda a, b: a.view(np.int32) < b.view(np.int32),
    "fma.rn.bf16x2": _pairs_fma,
    "mul.rn.bf16x2": _pairs_mul,
    "add.f32": lambda a, b: _bits(_float(a) + _float(b)),
    "mul.f32": lambda a, b: _bits(_float(a) * _float(b)),
    "fma.rn.f32": lambda a, b, c: _bits(_float(a) * _float(b) + _float(c)),
    "ex2.approx.f32": lambda a: _bits(np.exp2(_float(a))),
    "rcp.approx.f32": lambda a: _bits(1 / _float(a)),
    "cvt.rn.bf16x2.f32": lambda upper, lower: (
        _bfloat16(np.stack([_float(lower), _float(upper)], 1)).view(np.uint32).reshape(-1)
    ),
    "cvt.rn.bf16.f32": lambda a: _bfloat16(_float(a)).view(np.uint16),
}
