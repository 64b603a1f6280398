"""Codes as pairs of bfloat16 in PTX, instruction by instruction in NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from pallas_kernels.assembly import Assembly
from pallas_kernels.dequant_matmul.layout import CENTRES, UNIT, pack
from pallas_kernels.dequant_matmul.pairs_assembly import BITS, FACTORS, Decoder
from tests.pallas_kernels.ptx import Threads, bfloat16_pairs


@pytest.mark.parametrize("bits", BITS)
def test_pairs_are_codes_less_their_centre(bits):
    rng = np.random.default_rng(bits)
    codes = rng.integers(0, 2**bits, (999, UNIT)).astype(np.uint8)
    assert {code for code in range(2**bits)} == set(codes.reshape(-1).tolist())
    words = pack(codes, bits)[:, :, 0]
    assembly = Assembly()
    names = assembly.registers("b32", bits)
    pairs = Decoder(assembly, bits).pairs(names)
    given = {name: words[:, index].copy() for index, name in enumerate(names)}
    found = Threads(np.arange(999), registers=given).run(str(assembly)).registers
    made = np.stack([bfloat16_pairs(found[pair]) for pair in pairs], 1).reshape(-1, UNIT)
    np.testing.assert_array_equal(made, FACTORS[bits] * (codes - CENTRES[bits]))
