"""The 32 values of units as pairs in bfloat16, two in a register, inside a kernel.

A register has room for two numbers of 16 bits, and `layout` puts consecutive values into the halves
of a word. A field at bit p of a half is masked into the mantissa of 2^(7 - p), so that both become
2^(7 - p) + code in one instruction, and lose that and the centre of the codes in the next. With p
from 1 on, half a step below the codes has room too. Codes of 8 bits are put together of two halves
of theirs, each above 128. All of this is exact.
"""

from __future__ import annotations

import struct
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, UInt

from .._compat import INTERPRETER, assembled, current_target
from .layout import CENTRES

# By bits, for each word of a unit in turn and each pair of it: by how much the word is shifted
# left, and at which bit of a half the pair is then.
PLACES = {
    3: tuple(((1, 1), (1, 4), (-5, 1), (-5, 4), (last, 12 + last)) for last in (-11, -10, -9)),
    4: (((1, 1), (-3, 1), (-7, 1), (-11, 1)),),
}
# Then the highest bits of the halves, which make values 30 and 31, lie above each other from here.
LAST = 4


def values(
    words: list[UInt[Array, "*s"]], bits: int, scales: Float[Array, "*s"] | None = None
) -> list[Float[Array, "*s"]]:
    """The values in order, less the centre of the codes, in bfloat16.

    Args:
        words: of units, one array for each that follows. At 3 bits, whole units; else any number.
        bits: of a code.
        scales: what values are multiplied by, in bfloat16; the product is rounded once.
    """
    if bits == 8:
        return [each for word in words for by in (0, 8) for each in _of_bytes(word, by, scales)]
    found = []
    for index, word in enumerate(words):
        for left, place in PLACES[bits][index % len(PLACES[bits])]:
            found += _of_fields(_shifted(word, left), place, bits, scales)
    if bits == 3:
        found += _of_fields(_last(words), LAST, bits, scales)
    return found


def _last(words: list[UInt[Array, "*s"]]) -> UInt[Array, "*s"]:
    """Values 30 and 31, from `LAST` on in the halves."""
    first, second, third = (
        _shifted(word, PLACES[3][index][-1][0]) & jnp.uint32(0x10001 << LAST + index)
        for index, word in enumerate(words)
    )
    return first | second | third


def _of_fields(
    fields: UInt[Array, "*s"], place: int, bits: int, scales: Any
) -> list[Float[Array, "*s"]]:
    """What stands at some bit of the lower and of the upper halves."""
    if current_target().platform == INTERPRETER:
        return [_plainly(fields >> jnp.uint32(half + place), bits, scales) for half in (0, 16)]
    base = 2.0 ** (7 - place)
    return _halves(
        f"mov.b32 mask, {(2**bits - 1) * 0x10001 << place}; mov.b32 base, {_twice(base)}; "
        f"mov.b32 one, {_twice(1.0)}; mov.b32 less, {_twice(-base - CENTRES[bits])}; "
        "lop3.b32 low, $1, mask, base, 0xEA; fma.rn.bf16x2 both, low, one, less;",
        fields,
        scales,
    )


def _of_bytes(words: UInt[Array, "*s"], right: int, scales: Any) -> list[Float[Array, "*s"]]:
    """The bytes at some bit of the lower and of the upper halves."""
    if current_target().platform == INTERPRETER:
        return [_plainly(words >> jnp.uint32(half + right), 8, scales) for half in (0, 16)]
    return _halves(
        f"mov.b32 mask, 0x000F000F; mov.b32 base, {_twice(128.0)}; mov.b32 one, {_twice(1.0)}; "
        f"mov.b32 sixteen, {_twice(16.0)}; mov.b32 less, {_twice(-17 * 128.0 - CENTRES[8])}; "
        f"shr.b32 low, $1, {right}; shr.b32 high, $1, {right + 4}; "
        "lop3.b32 low, low, mask, base, 0xEA; lop3.b32 high, high, mask, base, 0xEA; "
        "fma.rn.bf16x2 high, high, sixteen, less; fma.rn.bf16x2 both, low, one, high;",
        words,
        scales,
    )


def _plainly(words: UInt[Array, "*s"], bits: int, scales: Any) -> Float[Array, "*s"]:
    """What the instructions make of the lowest field."""
    code = words & jnp.uint32(2**bits - 1)
    value = code.astype(jnp.float32) - CENTRES[bits]
    return (value if scales is None else value * scales.astype(jnp.float32)).astype(jnp.bfloat16)


def _halves(text: str, words: UInt[Array, "*s"], scales: Any) -> list[Float[Array, "*s"]]:
    """The halves of what is made of words, the lower first.

    The instructions are given for each half, and the assembler leaves out those that are there
    already: then it sees that the halves of a register are wanted, and takes the register.

    Args:
        text: instructions that make `both` of $1; see `_compat.assembled`.
        words: to make it of.
        scales: see `values`.
    """
    arguments, constraints = [lax.bitcast_convert_type(words, jnp.int32)], "=h,r"
    if scales is not None:
        arguments, constraints = [*arguments, scales], "=h,r,h"
        # Minus zero keeps the sign of a zero.
        text += (
            f" mov.b32 base, {{$2, $2}}; mov.b32 less, {_twice(-0.0)};"
            " fma.rn.bf16x2 both, both, base, less;"
        )
    return [
        assembled(
            "{ .reg .b32 mask, base, low, high, one, sixteen, less, both; .reg .b16 other; "
            f"{text} mov.b32 {{{order}}}, both; }}",
            arguments,
            constraints,
            jax.ShapeDtypeStruct(words.shape, jnp.bfloat16),
        )
        for order in ("$0, other", "other, $0")
    ]


def _twice(number: float) -> str:
    """A number that bfloat16 has, in both halves of a register."""
    (whole,) = struct.unpack(">I", struct.pack(">f", number))
    if whole & 0xFFFF:
        raise ValueError(f"{number} is no number of bfloat16")
    return f"{(whole >> 16) * 0x10001:#x}"


def _shifted(word: UInt[Array, "*s"], left: int) -> UInt[Array, "*s"]:
    return word << jnp.uint32(left) if left > 0 else word >> jnp.uint32(-left)
