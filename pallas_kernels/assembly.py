"""PTX, an instruction at a time, for what the compilers of kernels give no way to say."""

from __future__ import annotations

import struct
from collections.abc import Sequence


class Assembly:
    """A piece of a program, in a scope of its own: its registers and labels are not seen outside.

    Operands are registers, numbers, or placeholders ($0, $1, ...) of what the piece is given.
    """

    def __init__(self) -> None:
        self._registers: list[str] = []
        self._lines: list[str] = []

    def __str__(self) -> str:
        return "\n".join(["{", *self._registers, *self._lines, "}"])

    def register(self, kind: str) -> str:
        """A new register of a type, such as "b32"."""
        name = f"%v{len(self._registers)}"
        self._registers.append(f".reg .{kind} {name};")
        return name

    def registers(self, kind: str, count: int) -> list[str]:
        """So many new ones."""
        return [self.register(kind) for _ in range(count)]

    def do(self, operation: str, *operands: object, when: str | None = None) -> None:
        """An instruction; only in threads where a predicate holds, if one is named."""
        guard = f"@{when} " if when else ""
        self._lines.append(f"{guard}{operation} {', '.join(map(str, operands))};")

    def b32(self, operation: str, *operands: object) -> str:
        """The result of an instruction, of 32 bits."""
        return self._made("b32", operation, operands)

    def b64(self, operation: str, *operands: object) -> str:
        """The result of an instruction, of 64 bits."""
        return self._made("b64", operation, operands)

    def f32(self, operation: str, *operands: object) -> str:
        """The result of an instruction, a float32."""
        return self._made("f32", operation, operands)

    def holds(self, comparison: str, *operands: object) -> str:
        """The predicate that a comparison makes, such as "lt.u32"."""
        return self._made("pred", f"setp.{comparison}", operands)

    def label(self, name: str) -> None:
        """Where a branch may go to."""
        self._lines.append(f"{name}:")

    def masked(self, word: str, mask: int, rest: str) -> str:
        """Some bits of a word, and those of the rest."""
        return self.b32("lop3.b32", word, f"0x{mask:08X}", rest, "0xEA")

    def load_shared(self, count: int, address: str, offset: int) -> list[str]:
        """Some words, a power of two up to 4, from shared memory."""
        words = self.registers("b32", count)
        self.do(f"ld.shared{_vector(count)}.b32", braces(words), f"[{address}+{offset}]")
        return words

    def store_shared(self, words: Sequence[str], address: str, offset: int) -> None:
        """Some words, a power of two up to 4, to shared memory."""
        self.do(f"st.shared{_vector(len(words))}.b32", f"[{address}+{offset}]", braces(words))

    def _made(self, kind: str, operation: str, operands: Sequence[object]) -> str:
        result = self.register(kind)
        self.do(operation, result, *operands)
        return result


def braces(words: Sequence[str]) -> str:
    """Operands of an instruction on vectors; of one alone, it itself."""
    return words[0] if len(words) == 1 else f"{{{', '.join(words)}}}"


def float32(number: float) -> str:
    """A number as PTX writes a float32 exactly."""
    return f"0f{struct.unpack('>I', struct.pack('>f', number))[0]:08X}"


def _vector(count: int) -> str:
    return "" if count == 1 else f".v{count}"
