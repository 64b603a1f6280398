"""The 32 values of units, inside a kernel.

For products on CUDA cores, a field at bit p is masked into the mantissa of 2^(23 - p), which gives
2^(23 - p) + value without converting integers. Words are shifted so that fields come to positions
that cost the fewest bits of the sum, where those 2^(23 - p), the offsets, come off again. For
tensor cores see `pairs`.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Shaped, UInt

from .._compat import INTERPRETER, assembled, current_target, multiply_add
from .layout import UNIT, first_bits
from .pairs import values

# By bits: up to which bit a field begins that is shifted left, and by how much; from which bit on
# one does that is shifted right, and by how much in each word in turn. At 3 bits, the highest bits
# of the words, which make value 31, so come to lie one above the other.
LEFT = {3: (9, 11), 4: (8, 11), 8: (8, 7)}
RIGHT = {3: (22, (11, 10, 9)), 4: (20, (9,)), 8: (16, (9,))}
# At 3 bits, which bit of the words makes values 30 and 31, and where these are put.
LAST_FIRST = 15, 31
LAST_POSITIONS = 15, 20


def offsets(bits: int) -> tuple[float, ...]:
    """For each value of a unit: what it is more in `multiplied`."""
    return tuple(2.0 ** (23 - position) for position in positions(bits))


def positions(bits: int) -> tuple[int, ...]:
    """At what bit of the mantissa each value of a unit is put."""
    fields = [
        first + _shift(bits, word, first) for word in range(bits) for first in first_bits(bits)
    ]
    return (*fields, *LAST_POSITIONS)[:UNIT]


def centred(words: list[UInt[Array, "o u"]]) -> Float[Array, "o i"]:
    """The codes of units less their centre, in bfloat16, which holds them exactly."""
    return joined(values(words, len(words)))


def numbers(
    words: list[UInt[Array, "o u"]],
    scales: Float[Array, "o u"],
    offset: Float[Array, "o u"] | None,
) -> Float[Array, "o i"]:
    """The numbers that codes of units stand for, in bfloat16.

    Args:
        words: of the units, one array for each bit of a code.
        scales: of their groups, as they are stored.
        offset: what the centre of the codes stands for, in float32; zero if None.
    """
    bits = len(words)
    if offset is None and scales.dtype == jnp.bfloat16:
        return joined(values(words, bits, scales))
    scales = scales.astype(jnp.float32)
    if offset is None:
        offset = jnp.zeros_like(scales)
    return joined(
        [
            multiply_add(value.astype(jnp.float32), scales, offset).astype(jnp.bfloat16)
            for value in values(words, bits)
        ]
    )


def multiplied(
    words: list[UInt[Array, "*s"]], xs: list[Float[Array, "*s"]], start: Float[Array, "*s"]
) -> Float[Array, "*s"]:
    """Start + the sum over each unit's values of x times the code and its offset.

    Args:
        words: of the units, one array for each bit of a code.
        xs: inputs, by value of a unit.
        start: see there.
    """
    bits = len(words)
    if current_target().platform == INTERPRETER:
        for value, x in zip(_shifted_values(words), xs, strict=True):
            start = multiply_add(value, x, start)
        return start
    # All in one, since a kernel of a thousand operations takes seconds to compile.
    constraints = ",".join(["=f", *["r"] * bits, *["f"] * (UNIT + 1)])
    integers = [lax.bitcast_convert_type(word, jnp.int32) for word in words]
    return assembled(_multiplied(bits), [*integers, *xs, start], constraints)


def _shifted_values(words: list[UInt[Array, "*s"]]) -> list[Float[Array, "*s"]]:
    """Codes and their offsets, with the shifts of `_multiplied`."""
    bits = len(words)
    found = [
        _moved(words[word], _shift(bits, word, first))
        >> jnp.uint32(first + _shift(bits, word, first))
        for word in range(bits)
        for first in first_bits(bits)
    ]
    if bits == 3:
        for first, position in zip(LAST_FIRST, LAST_POSITIONS, strict=True):
            parts = [
                _moved(words[word], position + word - first) & jnp.uint32(1 << position + word)
                for word in range(3)
            ]
            found.append((parts[0] | parts[1] | parts[2]) >> jnp.uint32(position))
    mask = jnp.uint32(2**bits - 1)
    return [
        (code & mask).astype(jnp.float32) + offset
        for code, offset in zip(found, offsets(bits), strict=True)
    ]


def _multiplied(bits: int) -> str:
    """The instructions of `multiplied`; its arguments are $1, $2, ... and its result $0."""
    lines, fields = [".reg .b32 field, mask;", ".reg .f32 value, sum;"], []

    def moved(word: int, left: int) -> str:
        if left == 0:
            return f"${1 + word}"
        name = f"w{word}_{'left' if left > 0 else 'right'}_{abs(left)}"
        line = f"{'shl' if left > 0 else 'shr'}.b32 {name}, ${1 + word}, {abs(left)};"
        if (declared := f".reg .b32 {name}; {line}") not in lines:
            lines.append(declared)
        return name

    def masked(field: str, mask: int, rest: str) -> str:
        return f"mov.b32 mask, {mask}; lop3.b32 field, {field}, mask, {rest}, 0xEA;"

    for word in range(bits):
        fields += [moved(word, _shift(bits, word, first)) for first in first_bits(bits)]
    whole = [
        [masked(field, (2**bits - 1) << p, str(_one(p)))]
        for field, p in zip(fields, positions(bits), strict=False)
    ]
    if bits == 3:
        for first, position in zip(LAST_FIRST, LAST_POSITIONS, strict=True):
            parts = [moved(word, position + word - first) for word in range(3)]
            rests = str(_one(position)), "field", "field"
            whole.append(
                [
                    masked(part, 1 << position + word, rest)
                    for word, (part, rest) in enumerate(zip(parts, rests, strict=True))
                ]
            )
    lines.append(f"mov.f32 sum, ${1 + bits + UNIT};")
    for value, made in enumerate(whole):
        lines += [
            *made,
            "mov.b32 value, field;",
            f"fma.rn.f32 sum, value, ${1 + bits + value}, sum;",
        ]
    return "{ " + " ".join([*lines, "mov.f32 $0, sum;"]) + " }"


def _one(position: int) -> int:
    """The bits of 2^(23 - position) in float32."""
    return (127 + 23 - position) << 23


def joined(values: list[Float[Array, "*s"]]) -> Float[Array, "*t"]:
    """The values of a unit, in order, along a last axis; units side by side if there are some."""
    return stacked(values).reshape(values[0].shape[0], -1)


def stacked(values: list[Shaped[Array, "*s"]]) -> Shaped[Array, "*t"]:
    """Further axes of two, whose elements are the values in order."""
    while len(values) > 1:
        half = len(values) // 2
        both = zip(values[:half], values[half:], strict=True)
        values = [jnp.stack(pair, axis=-1) for pair in both]
    return values[0]


def _shift(bits: int, word: int, first: int) -> int:
    """By how much a word is shifted left for the field that begins at a bit."""
    (last_left, left), (first_right, right) = LEFT[bits], RIGHT[bits]
    if first <= last_left:
        return left
    return -right[word % len(right)] if first >= first_right else 0


def _moved(word: UInt[Array, "*s"], left: int) -> UInt[Array, "*s"]:
    if left == 0:
        return word
    return word << jnp.uint32(left) if left > 0 else word >> jnp.uint32(-left)
