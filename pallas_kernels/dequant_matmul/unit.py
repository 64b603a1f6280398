"""The 32 values of units, inside a kernel.

A field is masked into the mantissa of 1.0, which gives 1 + value * 2^(position - 23) without
converting integers. Fields are shifted together to positions that cost the fewest bits of the sum:
the 1 is 2^(23 - position) times a step, and comes off at the end.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, UInt

from .._compat import as_mantissa, multiply_add
from .layout import CENTRES, UNIT

# By bits, for each field of a word in order: by how much the word is shifted left.
SHIFTS = {
    3: (11,) * 4 + (0,) * 3 + (-7,) * 3,
    4: (11,) * 3 + (0,) * 2 + (-9,) * 3,
    8: (7,) * 2 + (-9,) * 2,
}
TOP_POSITION = 20


def positions(bits: int) -> tuple[int, ...]:
    """At what bit of the mantissa each value of a unit is put."""
    count = 32 // bits
    fields = [bits * field + SHIFTS[bits][field] for field in range(count)]
    return tuple(
        TOP_POSITION if value >= bits * count else fields[value % count] for value in range(UNIT)
    )


def multipliers(bits: int) -> tuple[float, ...]:
    """For each value of a unit: what makes a step of its mantissa 1."""
    return tuple(2.0 ** (23 - position) for position in positions(bits))


def mantissas(words: list[UInt[Array, "*s"]]) -> list[Float[Array, "*s"]]:
    """For each value: 1 + value / multiplier.

    Args:
        words: of the units, one array for each bit of a code.
    """
    bits = len(words)
    count, mask, found = 32 // bits, 2**bits - 1, []
    shifted = [{by: _shifted(word, by) for by in set(SHIFTS[bits])} for word in words]
    for value, position in enumerate(positions(bits)):
        if value < bits * count:
            word = shifted[value // count][SHIFTS[bits][value % count]]
        else:
            word = _top(words, value)
        found.append(as_mantissa(word, mask << position))
    return found


def centred(words: list[UInt[Array, "o u"]]) -> Float[Array, "o i"]:
    """The codes of units from the centre, in steps of `step(bits)`: integers, in bfloat16."""
    bits = len(words)
    values = []
    for mantissa, multiplier in zip(mantissas(words), multipliers(bits), strict=True):
        multiplier = multiplier / step(bits)
        offset = jnp.float32(-multiplier - CENTRES[bits] / step(bits))
        values.append(multiply_add(mantissa, multiplier, offset).astype(jnp.bfloat16))
    return joined(values)


def step(bits: int) -> float:
    """Size of a step of `centred`, in codes: 0.5 where the centre is between two of them."""
    return 0.5 if CENTRES[bits] % 1 else 1.0


def joined(values: list[Float[Array, "*s"]]) -> Float[Array, "*t"]:
    """The values of a unit, in order, along a last axis; units side by side if there are some."""
    while len(values) > 1:
        half = len(values) // 2
        pairs = zip(values[:half], values[half:], strict=True)
        values = [jnp.stack(pair, axis=-1) for pair in pairs]
    return values[0].reshape(values[0].shape[0], -1)


def _shifted(word: UInt[Array, "*s"], left: int) -> UInt[Array, "*s"]:
    if left == 0:
        return word
    return word << jnp.uint32(left) if left > 0 else word >> jnp.uint32(-left)


def _top(words: list[UInt[Array, "*s"]], value: int) -> UInt[Array, "*s"]:
    """A value that has a bit in each word, at `TOP_POSITION`."""
    parts = [
        (word >> jnp.uint32(value - TOP_POSITION - bit)) & jnp.uint32(1 << (TOP_POSITION + bit))
        for bit, word in enumerate(words)
    ]
    return parts[0] | parts[1] | parts[2]
