"""Products with codes read no number that is not theirs."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dequant_matmul import layout, operands, tile
from pallas_kernels.dequant_matmul.config import SomeRows
from pallas_kernels.testing import interpreted


class Rows:
    """Rows that tell where they are read."""

    def __init__(self, shape: tuple[int, int]):
        self.shape, self.at = shape, self

    def __getitem__(self, index: Any) -> tuple[np.ndarray, ...]:
        return tuple(np.asarray(i) for i in index)


@pytest.mark.parametrize("bits", layout.BITS)
@pytest.mark.parametrize("inputs", [384, 200, 512])
def test_each_word_is_read_once_and_none_past_the_end(monkeypatch, inputs, bits):
    """The interpreter moves such reads back into the row; a device reads the row behind it."""
    outputs, units, read = 20, layout.unit_count(inputs), []

    def load(at: tuple[np.ndarray, ...], mask: Any, other: Any) -> jnp.ndarray:
        row, column = np.broadcast_arrays(*at)
        inside = np.ones(row.shape, bool) if mask is None else np.asarray(mask)
        assert (row[inside] < outputs).all() and (column[inside] < bits * units).all()
        read.extend(zip(row[inside].tolist(), column[inside].tolist(), strict=True))
        return jnp.zeros(row.shape, jnp.uint32)

    monkeypatch.setattr(operands.plt, "load", load)
    config = SomeRows(16, 32, blocks=2)
    shape = operands.Shape(16, inputs, outputs, bits, units, 4, jnp.float32)
    with interpreted():
        for start in range(0, units, config.units):
            tile._codes(shape, config, Rows((outputs, bits * units)), 0, 0, start)
    assert len(read) == len(set(read)) == outputs * bits * units
