"""How codes of 3, 4 and 8 bits lie in memory, version 2.

A unit is 32 consecutive values along the input dimension, in as many uint32 words as a code has
bits: a matrix [O I] is uint32 [O Q U], with Q bits a code and U = ceil(I / 32) units a row.

Both halves of a word, 16 bits each, have the same fields, and values alternate between them: 2 j is
in the lower half, 2 j + 1 in the same bits of the upper one. So an instruction that takes two
numbers of 16 bits takes two consecutive values.

    4 bits: values 8 i + 2 j and the next are in bits 4 j to 4 j + 3 of the halves of word i.
    8 bits: values 4 i + 2 j and the next are in bits 8 j to 8 j + 7 of the halves of word i.
    3 bits: values 10 i + 2 j and the next are in bits 3 j to 3 j + 2 of the halves of word i, with
        j below 5. That leaves the highest bit of each half: bit i of values 30 and 31 is that of
        the halves of word i.

The values of the last unit from I on are codes 0; whatever reads them must not count them.

Consecutive values along the input share a scale and, perhaps, a zero point: groups of 32, 64 or
128, J = ceil(I / group) of them a row, the last one as short as it must be. A code c stands for
scale * (c - zero). Without a zero point, it is `CENTRES`: levels lie as far below zero as above,
except at 8 bits, where the integer in the middle keeps differences exact in bfloat16.

Letters: O outputs, I inputs, Q bits, U units, J groups.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt

FORMAT_VERSION = 2
BITS = (3, 4, 8)
GROUP_SIZES = (32, 64, 128)
UNIT = 32
CENTRES = {3: 3.5, 4: 7.5, 8: 128.0}


def pack(values: Any, bits: int) -> Any:
    """Codes in words: [... I] to uint32 [... Q U], of NumPy for NumPy's arrays, else of JAX.

    Args:
        values: integers from 0 to 2^bits - 1. NumPy's are checked; of JAX's the other bits are
            dropped.
        bits: 3, 4 or 8.

    Raises:
        ValueError: the values or the bits are others.
    """
    _check_bits(bits)
    xp: Any = np if isinstance(values, np.ndarray) else jnp
    if not xp.issubdtype(values.dtype, xp.integer) or values.ndim == 0 or values.size == 0:
        raise ValueError(
            f"values to pack are {values.dtype}{list(values.shape)}; accepted are integers along "
            "an axis that holds some"
        )
    if xp is np and not 0 <= values.min() <= values.max() < 2**bits:
        raise ValueError(
            f"values to pack run from {values.min()} to {values.max()}; accepted is 0 to "
            f"{2**bits - 1} at {bits} bits"
        )
    inputs = values.shape[-1]
    units = unit_count(inputs)
    tail = [(0, 0)] * (values.ndim - 1) + [(0, units * UNIT - inputs)]
    wide = xp.pad(values.astype(xp.uint32) & xp.uint32(2**bits - 1), tail)
    wide = wide.reshape(*values.shape[:-1], units, UNIT)
    words = [xp.zeros(wide.shape[:-1], xp.uint32) for _ in range(bits)]
    for value in range(UNIT):
        code = wide[..., value]
        for word, start, first, count in _pieces(bits, value):
            piece = (code >> xp.uint32(first)) & xp.uint32(2**count - 1)
            words[word] = words[word] | (piece << xp.uint32(start))
    return xp.stack(words, axis=-2)


def unpack(codes: Any, inputs: int) -> Any:
    """The values in words: uint32 [... Q U] to uint8 [... I], of NumPy or JAX as the words are.

    Args:
        codes: see `pack`.
        inputs: I.

    Raises:
        ValueError: the words are no such codes of so many values.
    """
    xp: Any = np if isinstance(codes, np.ndarray) else jnp
    if codes.dtype != xp.uint32 or codes.ndim < 2:
        raise ValueError(
            f"codes are {codes.dtype}{list(codes.shape)}; accepted is uint32 [... Q U]"
        )
    bits, units = codes.shape[-2:]
    _check_bits(bits)
    if units != unit_count(inputs):
        raise ValueError(
            f"codes hold {units} units of {UNIT} values; {inputs} values need {unit_count(inputs)}"
        )
    words = xp.swapaxes(codes, -1, -2)[..., None]
    first = xp.asarray(first_bits(bits), xp.uint32)
    values = (words >> first.reshape((1,) * (words.ndim - 1) + first.shape)) & xp.uint32(
        2**bits - 1
    )
    # Narrow before they are joined: XLA may keep what it joins in memory.
    values = values.astype(xp.uint8).reshape(*words.shape[:-2], bits * len(first))
    if bits == 3:
        single = [(words[..., word, :] >> xp.uint32(15)) & xp.uint32(0x10001) for word in range(3)]
        both = single[0] | (single[1] << xp.uint32(1)) | (single[2] << xp.uint32(2))
        last = (part.astype(xp.uint8) for part in (both & xp.uint32(7), both >> xp.uint32(16)))
        values = xp.concatenate([values, *last], axis=-1)
    return values.reshape(*codes.shape[:-2], units * UNIT)[..., :inputs]


def dequantise(
    codes: UInt[Array, "*O Q U"],
    scale: Float[Array, "*O J"],
    zero: Float[Array, "*O J"] | None,
    inputs: int,
    group_size: int,
) -> Float[Array, "*O I"]:
    """The numbers that codes stand for, in float32."""
    bits = codes.shape[-2]
    values = unpack(codes, inputs).astype(jnp.float32)
    wide_scale = _of_inputs(scale, inputs, group_size)
    if zero is None:
        return wide_scale * (values - CENTRES[bits])
    return wide_scale * (values - _of_inputs(zero, inputs, group_size))


def unit_count(inputs: int) -> int:
    """Units that hold so many values."""
    return -(-inputs // UNIT)


def first_bits(bits: int) -> tuple[int, ...]:
    """Where the values of a word that lie in it whole begin, in order."""
    return tuple(half + bits * j for j in range(16 // bits) for half in (0, 16))


def group_count(inputs: int, group_size: int) -> int:
    """Groups that so many values make."""
    return -(-inputs // group_size)


def _of_inputs(x: Array, inputs: int, group_size: int) -> Array:
    """A number a group as one a value."""
    return jnp.repeat(x.astype(jnp.float32), group_size, axis=-1)[..., :inputs]


def _pieces(bits: int, value: int) -> list[tuple[int, int, int, int]]:
    """Where a value of a unit is: word, first bit in it, first bit of the code, number of bits."""
    first = first_bits(bits)
    if value >= bits * len(first):
        return [(word, 15 + 16 * (value % 2), word, 1) for word in range(bits)]
    return [(value // len(first), first[value % len(first)], 0, bits)]


def _check_bits(bits: int) -> None:
    if bits not in BITS:
        raise ValueError(f"codes have {bits} bits; accepted is 3, 4 or 8")
