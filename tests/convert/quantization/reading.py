"""Codes read from files by what docs say of their layout, in float64, one value at a time."""

from __future__ import annotations

import numpy as np

from tests.convert.sources import Arrays

CENTRES = {3: 3.5, 4: 7.5, 8: 128.0}


def unpacked(words: np.ndarray, inputs: int) -> np.ndarray:
    """Values [*, O, I] of words [*, O, Q, U]."""
    bits = words.shape[-2]
    values = np.zeros((*words.shape[:-2], words.shape[-1] * 32), np.int64)
    for number in range(values.shape[-1]):
        unit, value = divmod(number, 32)
        word = words[..., unit].astype(np.int64)
        # Even values are in the lower halves of words, odd ones in the upper.
        half = value % 2 * 16
        if bits == 3 and value >= 30:
            found = sum(((word[..., i] >> (half + 15)) & 1) << i for i in range(3))
        else:
            i, j = divmod(value // 2, 16 // bits)
            found = (word[..., i] >> (half + bits * j)) & (2**bits - 1)
        values[..., number] = found
    assert not values[..., inputs:].any()
    return values[..., :inputs]


def dequantised(arrays: Arrays, key: str, inputs: int, group_size: int) -> np.ndarray:
    """What the codes under a key stand for, float64 [*, O, I]."""
    words = arrays[f"{key}.codes"]
    groups = np.arange(inputs) // group_size
    scale = arrays[f"{key}.scale"].astype(np.float64)[..., groups]
    zero = CENTRES[words.shape[-2]]
    if f"{key}.zero" in arrays:
        zero = arrays[f"{key}.zero"].astype(np.float64)[..., groups]
    found = scale * (unpacked(words, inputs) - zero)
    if f"{key}.input_scale" in arrays:
        found = found * arrays[f"{key}.input_scale"].astype(np.float64)[..., None, :]
    return found
