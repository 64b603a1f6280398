"""The 32 values of units as pairs in bfloat16, two in a register, inside a kernel.

A register has room for two numbers of 16 bits. Fields that follow each other are brought into its
halves, one bit above the lowest, and masked into the mantissa of 64, whose lowest bit is a half: so
that both become 64 + code in one instruction, and lose 64 and the centre of the codes in the next.
Codes of 8 bits are put together of two halves of theirs, each above 128. All of this is exact.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, UInt

from .._compat import INTERPRETER, assembled, current_target, selected
from .layout import CENTRES

LOW = 0xFFFF
# By bits: how far a word is shifted left for the lower and the upper half of a register, and how
# far that is shifted right then, for each pair.
HALVES = {
    3: (((1, 14), (0, 6, 12)), ((-17, -4), (0, 6))),
    4: (((1, 13), (0, 8)), ((-15, -3), (0, 8))),
}
# Numbers in bfloat16, twice: 64, 128, 1, 16; and, by bits, -(64 + centre). For 8 bits, where a
# code is 16 (128 + upper half) + 128 + lower half, what is too much of it.
SIXTY_FOUR, ONE_HUNDRED_AND_TWENTY_EIGHT = "0x42804280", "0x43004300"
ONE, SIXTEEN = "0x3F803F80", "0x41804180"
LESS = {3: "0xC287C287", 4: "0xC28FC28F", 8: "0xC510C510"}


def values(words: list[UInt[Array, "*s"]], bits: int) -> list[Float[Array, "*s"]]:
    """The values in order, less the centre of the codes, in bfloat16.

    Args:
        words: of units, one array for each that follows. At 3 bits, whole units; else any number.
        bits: of a code.
    """
    if bits == 8:
        return [value for word in words for first in (0, 2) for value in _of_bytes(word, first)]
    fields = []
    for word in words:
        for (low, high), rights in HALVES[bits]:
            both = selected(_shifted(word, low), _shifted(word, high), LOW)
            fields += [_shifted(both, -right) for right in rights]
    if bits == 3:
        fields.append(_last_two(*words))
    return [value for field in fields for value in _of_fields(field, bits)]


def _last_two(
    first: UInt[Array, "*s"], second: UInt[Array, "*s"], third: UInt[Array, "*s"]
) -> UInt[Array, "*s"]:
    """Values 30 and 31, see `layout`, in the halves of a register."""
    low = selected(first >> jnp.uint32(28), second >> jnp.uint32(29), 0b1100)
    high = selected(third >> jnp.uint32(13), second >> jnp.uint32(12), 0b11 << 17)
    return selected(low, high, LOW)


def _of_fields(fields: UInt[Array, "*s"], bits: int) -> list[Float[Array, "*s"]]:
    if current_target().platform == INTERPRETER:
        return [_plainly(fields >> jnp.uint32(right), bits) for right in (1, 17)]
    return _halves(
        f"mov.b32 mask, {(2**bits - 1) * 0x20002}; mov.b32 base, {SIXTY_FOUR}; "
        f"mov.b32 one, {ONE}; mov.b32 less, {LESS[bits]}; "
        "lop3.b32 low, $1, mask, base, 0xEA; fma.rn.bf16x2 both, low, one, less;",
        fields,
    )


def _of_bytes(words: UInt[Array, "*s"], first: int) -> list[Float[Array, "*s"]]:
    if current_target().platform == INTERPRETER:
        return [_plainly(words >> jnp.uint32(8 * byte), 8) for byte in (first, first + 1)]
    return _halves(
        f"mov.b32 mask, 0x000F000F; mov.b32 base, {ONE_HUNDRED_AND_TWENTY_EIGHT}; "
        f"mov.b32 one, {ONE}; mov.b32 sixteen, {SIXTEEN}; mov.b32 less, {LESS[8]}; "
        # Bytes first, 4, first + 1 and 4, from the lowest on; 4 is one of the zero.
        f"prmt.b32 high, $1, 0, {0x4140 + 0x0101 * first:#x}; "
        "lop3.b32 low, high, mask, base, 0xEA; shr.b32 high, high, 4; "
        "lop3.b32 high, high, mask, base, 0xEA; fma.rn.bf16x2 high, high, sixteen, less; "
        "fma.rn.bf16x2 both, low, one, high;",
        words,
    )


def _plainly(words: UInt[Array, "*s"], bits: int) -> Float[Array, "*s"]:
    """What the instructions make of the lowest field."""
    code = words & jnp.uint32(2**bits - 1)
    return (code.astype(jnp.float32) - CENTRES[bits]).astype(jnp.bfloat16)


def _halves(text: str, words: UInt[Array, "*s"]) -> list[Float[Array, "*s"]]:
    """The halves of what is made of words, the lower first.

    The instructions are given for each half, and the assembler leaves out those that are there
    already: then it sees that the halves of a register are wanted, and takes the register.

    Args:
        text: instructions that make `both` of $1; see `_compat.assembled`.
        words: to make it of.
    """
    return [
        assembled(
            "{ .reg .b32 mask, base, low, high, one, sixteen, less, both; .reg .b16 other; "
            f"{text} mov.b32 {{{order}}}, both; }}",
            [lax.bitcast_convert_type(words, jnp.int32)],
            "=h,r",
            jax.ShapeDtypeStruct(words.shape, jnp.bfloat16),
        )
        for order in ("$0, other", "other, $0")
    ]


def _shifted(word: UInt[Array, "*s"], left: int) -> UInt[Array, "*s"]:
    if left == 0:
        return word
    return word << jnp.uint32(left) if left > 0 else word >> jnp.uint32(-left)
