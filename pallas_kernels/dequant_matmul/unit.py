"""The 32 values of units, inside a kernel.

A field at bit p is masked into the mantissa of 2^(23 - p), which gives 2^(23 - p) + value without
converting integers. Fields are shifted together to positions that cost the fewest bits of the sum,
where those 2^(23 - p), the offsets, come off again.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Shaped, UInt

from .._compat import INTERPRETER, as_mantissa, assembled, current_target, multiply_add, selected
from .layout import CENTRES, UNIT
from .pairs import values

# By bits, for each field of a word in order: by how much the word is shifted left.
SHIFTS = {
    3: (11,) * 4 + (0,) * 3 + (-9,) * 3,
    4: (11,) * 3 + (0,) * 2 + (-9,) * 3,
    8: (7,) * 2 + (-9,) * 2,
}
# At 3 bits, the last fields of each word go one bit further than those of the word before: then
# what is left of the words, values 30 and 31, lies together.
LAST_POSITIONS = (20, 19)


def offsets(bits: int) -> tuple[float, ...]:
    """For each value of a unit: what it is more in `shifted_values`."""
    return tuple(2.0 ** (23 - position) for position in positions(bits))


def positions(bits: int) -> tuple[int, ...]:
    """At what bit of the mantissa each value of a unit is put."""
    count = 32 // bits
    fields = [
        bits * field + _shift(bits, word, field) for word in range(bits) for field in range(count)
    ]
    return (*fields, *LAST_POSITIONS)[:UNIT]


def shifted_values(words: list[UInt[Array, "*s"]]) -> list[Float[Array, "*s"]]:
    """For each value of a unit: the value and its offset.

    Args:
        words: of the units, one array for each bit of a code.
    """
    bits = len(words)
    count = 32 // bits
    moved = [
        {by: _shifted(words[word], by) for by in {_shift(bits, word, i) for i in range(count)}}
        for word in range(bits)
    ]
    found = [moved[word][_shift(bits, word, i)] for word in range(bits) for i in range(count)]
    if bits == 3:
        first, second, third = (moved[word][_shift(3, word, count - 1)] for word in range(3))
        found += [selected(first, second, 3 << 21), selected(second, third, 1 << 21)]
    mask = 2**bits - 1
    return [
        as_mantissa(word, mask << position, 23 - position)
        for word, position in zip(found, positions(bits), strict=True)
    ]


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
        words: see `shifted_values`.
        scales: of their groups.
        offset: what the centre of the codes stands for; zero if None.
    """
    bits = len(words)
    # What the offsets add comes off in the same instruction. That is off by less than 1/4096 of a
    # step, and 1/256 at 8 bits: little beside what is rounded off for bfloat16.
    lower = {}
    for above in set(offsets(bits)):
        distance = jnp.full(scales.shape, -(above + CENTRES[bits]), jnp.float32)
        lower[above] = (
            distance * scales if offset is None else multiply_add(distance, scales, offset)
        )
    return joined(
        [
            multiply_add(value, scales, lower[above]).astype(jnp.bfloat16)
            for value, above in zip(shifted_values(words), offsets(bits), strict=True)
        ]
    )


def multiplied(
    words: list[UInt[Array, "*s"]], xs: list[Float[Array, "*s"]], start: Float[Array, "*s"]
) -> Float[Array, "*s"]:
    """Start + the sum over units of x times what `shifted_values` gives."""
    if current_target().platform == INTERPRETER:
        for value, x in zip(shifted_values(words), xs, strict=True):
            start = multiply_add(value, x, start)
        return start
    # All in one, since a kernel of a thousand operations takes seconds to compile.
    bits = len(words)
    constraints = ",".join(["=f", *["r"] * bits, *["f"] * (UNIT + 1)])
    integers = [lax.bitcast_convert_type(word, jnp.int32) for word in words]
    return assembled(_multiplied(bits), [*integers, *xs, start], constraints)


def _multiplied(bits: int) -> str:
    """The instructions of `multiplied`; its arguments are $1, $2, ... and its result $0."""
    count, mask = 32 // bits, 2**bits - 1
    lines, fields = [".reg .b32 field, mask;", ".reg .f32 value, sum;"], []
    for word in range(bits):
        for left in {_shift(bits, word, field) for field in range(count)}:
            name, operation = _moved(word, left), "shl" if left > 0 else "shr"
            lines.append(f".reg .b32 {name}; {operation}.b32 {name}, ${1 + word}, {abs(left)};")
        fields += [_moved(word, _shift(bits, word, field)) for field in range(count)]
    if bits == 3:
        first, second, third = (_moved(word, _shift(3, word, count - 1)) for word in range(3))
        for name, high, low, inside in (("v30", first, second, 6), ("v31", second, third, 2)):
            lines.append(f".reg .b32 {name}, mask_{name}; mov.b32 mask_{name}, {inside << 20};")
            lines.append(f"lop3.b32 {name}, {high}, {low}, mask_{name}, 0xE4;")
            fields.append(name)
    lines.append(f"mov.f32 sum, ${1 + bits + UNIT};")
    for value, (field, position) in enumerate(zip(fields, positions(bits), strict=True)):
        power = (127 + 23 - position) << 23
        lines.append(f"mov.b32 mask, {mask << position};")
        lines.append(f"lop3.b32 field, {field}, mask, {power}, 0xEA; mov.b32 value, field;")
        lines.append(f"fma.rn.f32 sum, value, ${1 + bits + value}, sum;")
    return "{ " + " ".join([*lines, "mov.f32 $0, sum;"]) + " }"


def _moved(word: int, left: int) -> str:
    return f"w{word}_{'left' if left > 0 else 'right'}_{abs(left)}"


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


def _shift(bits: int, word: int, field: int) -> int:
    left = SHIFTS[bits][field]
    return left - word if bits == 3 and left < 0 else left


def _shifted(word: UInt[Array, "*s"], left: int) -> UInt[Array, "*s"]:
    if left == 0:
        return word
    return word << jnp.uint32(left) if left > 0 else word >> jnp.uint32(-left)
