"""Products with codes read no number that is not theirs."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dequant_matmul import layout, operands, some_rows
from pallas_kernels.dequant_matmul.config import BLOCK_UNITS, SomeRows


class Rows:
    """Rows that tell where they are read."""

    def __init__(self, shape: tuple[int, int]):
        self.shape, self.at = shape, self

    def __getitem__(self, index: Any) -> tuple[np.ndarray, ...]:
        return tuple(np.asarray(i) for i in index)


@pytest.mark.parametrize("inputs", [384, 200, 512])
def test_no_row_is_read_past_its_end(monkeypatch, inputs):
    """The interpreter moves such reads back into the row; a device reads the row behind it."""
    read = []

    def load(at: tuple[np.ndarray, ...], mask: Any, other: Any) -> jnp.ndarray:
        row, column = np.broadcast_arrays(*at)
        inside = np.ones(row.shape, bool) if mask is None else np.asarray(mask)
        assert (column[inside] < inputs).all() and (row[inside] < 16).all()
        read.extend(zip(row[inside].tolist(), column[inside].tolist(), strict=True))
        return jnp.zeros(row.shape, jnp.bfloat16)

    monkeypatch.setattr(operands.plt, "load", load)
    config = SomeRows(16, 32, blocks=2)
    units = layout.unit_count(inputs)
    shape = operands.Shape(16, inputs, 32, 3, units, 4, jnp.float32)
    for start in range(0, units, config.units):
        for block in range(config.blocks):
            unit = start + block * BLOCK_UNITS
            some_rows._inputs(shape, config, Rows((16, inputs)), 0, unit)
    assert len(read) == len(set(read)) == 16 * inputs
