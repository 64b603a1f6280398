"""Codes of a few bits in 32-bit words, and their way to bfloat16.

GPTQ and compressed-tensors pack alike, at every width: the codes of a row follow one another in a
stream of bits, low bits first, and may straddle two words. Both use float32 products of an
integer and a scale.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .quantised import BFLOAT16

# Elements worked on at a time: their float32 form stays in a core's second-level cache.
CHUNK = 1 << 17

Groups = int | np.ndarray
"""Which group of its row an input belongs to: the size of equal groups, or a number an input."""


def words_for(count: int, bits: int) -> int:
    """Number of 32-bit words that hold `count` codes of `bits` bits in one stream."""
    return -(-count * bits // 32)


def unpack(words: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Takes codes out of words that hold them as one stream of bits a row, low bits first.

    Args:
        words: int32 or uint32 [N, W] with `W >= words_for(count, bits)`.
        bits: 1 to 8.
        count: codes a row.

    Returns:
        uint8 [N, count].
    """
    if 8 % bits:
        return _unpack_straddling(words, bits, count)
    fields = np.ascontiguousarray(words).view(np.uint8)
    width = 8
    while width > bits:
        width //= 2
        fields = _halve(fields, width)
    return fields[:, :count]


def _halve(fields: np.ndarray, width: int) -> np.ndarray:
    """Splits fields of `2 * width` bits, one a byte, into fields of `width` bits, low one first."""
    pairs = fields.astype(np.uint16)
    pairs |= pairs << (8 - width)
    pairs &= 0x0101 * (2**width - 1)
    return pairs.view(np.uint8)


def _unpack_straddling(words: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Unpacks a width that does not divide 8: each 32 codes fill `bits` words."""
    rows, runs = len(words), -(-count // 32)
    stream = np.zeros((rows, runs * bits), np.uint32)
    used = min(stream.shape[1], words.shape[1])
    stream[:, :used] = words[:, :used].view(np.uint32)
    # One plane a word of the run, so that each step below works on contiguous memory.
    planes = np.ascontiguousarray(stream.reshape(rows * runs, bits).T)
    codes = np.empty((rows * runs, 32), np.uint8)
    for place in range(32):
        word, shift = divmod(place * bits, 32)
        field = planes[word] >> np.uint32(shift)
        if shift + bits > 32:
            field |= planes[word + 1] << np.uint32(32 - shift)
        field &= np.uint32(2**bits - 1)
        codes[:, place] = field
    return codes.reshape(rows, -1)[:, :count]


def group_map(numbers: np.ndarray | None, size: int, inputs: int) -> Groups:
    """Puts a map from inputs to groups into the form that is fast to use.

    Args:
        numbers: the group of each input, integers [inputs]; None for equal groups in order.
        size: inputs a group; the last group may have fewer.
        inputs: number of inputs.

    Returns:
        `size` where the groups are equal and in order, else the group of each input.
    """
    in_order = np.arange(inputs) // size
    if numbers is None or np.array_equal(numbers, in_order):
        return in_order if inputs % size else size
    return numbers


def dequantise(
    codes: Callable[[int, int], np.ndarray],
    zeros: np.ndarray | float,
    scales: np.ndarray,
    groups: Groups,
    inputs: int,
) -> np.ndarray:
    """Computes (code - zero) * scale in float32, rounded once to bfloat16.

    The difference of code and zero point is an integer below 2**9 and exact.

    Args:
        codes: gives the codes [stop - start, inputs] of rows `start` to `stop`, of any integer
            dtype of 8 bits.
        zeros: float32 [rows, groups], or one for all.
        scales: float32 [rows, groups].
        groups: which group an input belongs to.
        inputs: length of a row.

    Returns:
        bfloat16 [rows, inputs].
    """
    rows = len(scales)
    out = np.empty((rows, inputs), BFLOAT16)
    step = max(1, CHUNK // inputs)
    for start in range(0, rows, step):
        part = slice(start, min(start + step, rows))
        work = codes(part.start, part.stop).astype(np.float32)
        values = work.reshape(len(work), -1, groups) if isinstance(groups, int) else work
        values -= _spread(zeros[part], groups) if isinstance(zeros, np.ndarray) else zeros
        with np.errstate(over="ignore"):
            values *= _spread(scales[part], groups)
            out[part] = work
    return out


def _spread(of_groups: np.ndarray, groups: Groups) -> np.ndarray:
    """Gives each input the value of its group, by broadcasting where groups are equal."""
    return of_groups[:, :, None] if isinstance(groups, int) else of_groups[:, groups]
