"""Codes as pairs of bfloat16 in PTX, instruction by instruction in NumPy."""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.assembly import Assembly
from pallas_kernels.dequant_matmul.layout import CENTRES, UNIT, pack
from pallas_kernels.dequant_matmul.pairs_assembly import BITS, FACTOR, Decoder


def _halves(word: np.ndarray) -> np.ndarray:
    return word.view(np.uint16).view(ml_dtypes.bfloat16).astype(np.float64)


def _fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Of two numbers of bfloat16 in each word, rounded once."""
    exact = _halves(a) * _halves(b) + _halves(c)
    return exact.astype(np.float32).astype(ml_dtypes.bfloat16).view(np.uint32)


OPERATIONS = {
    "mov.b32": lambda a: a,
    "shl.b32": lambda a, n: a << n,
    "shr.u32": lambda a, n: a >> n,
    "fma.rn.bf16x2": _fma,
}


def _run(text: str, registers: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What is in registers behind the last instruction."""
    [count] = {array.shape[0] for array in registers.values()}

    def value(operand: str) -> np.ndarray:
        if operand in registers:
            return registers[operand]
        return np.full(count, int(operand, 0), np.uint32)

    for line in text.splitlines():
        if line in "{}" or line.startswith(".reg"):
            continue
        operation, result, *operands = re.split(r",? +", line.rstrip(";"))
        if operation == "lop3.b32":
            a, b, c = map(value, operands[:3])
            # 0xEA is what the table says of (a & b) | c.
            assert operands[3] == "0xEA"
            registers[result] = a & b | c
        else:
            registers[result] = OPERATIONS[operation](*map(value, operands))
    return registers


@pytest.mark.parametrize("bits", BITS)
def test_pairs_are_twice_the_codes_less_their_centre(bits):
    rng = np.random.default_rng(bits)
    codes = rng.integers(0, 2**bits, (999, UNIT)).astype(np.uint8)
    assert {code for code in range(2**bits)} == set(codes.reshape(-1).tolist())
    words = pack(codes, bits)[:, :, 0]
    assembly = Assembly()
    names = assembly.registers("b32", bits)
    pairs = Decoder(assembly, bits).pairs(names)
    given = {name: words[:, index].copy() for index, name in enumerate(names)}
    found = _run(str(assembly), given)
    made = np.stack([_halves(found[pair]).reshape(-1, 2) for pair in pairs], 1).reshape(-1, UNIT)
    np.testing.assert_array_equal(made, FACTOR * (codes - CENTRES[bits]))
