"""How products with codes are cut, by the sizes of a call."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from pallas_kernels._compat import Target
from pallas_kernels.dequant_matmul import layout, tile
from pallas_kernels.dequant_matmul.config import (
    SOME_ROWS,
    FewRows,
    ManyRows,
    SomeRows,
    Unpacked,
    heuristic,
)
from pallas_kernels.dequant_matmul.operands import Shape


@pytest.mark.parametrize(
    ("rows", "kind"),
    [(1, FewRows), (4, FewRows), (5, SomeRows), (64, SomeRows), (65, ManyRows), (256, Unpacked)],
)
def test_rows_decide_the_kernel(rows, kind):
    shape = Shape(rows, 2048, 12288, 3, 64, 4, jnp.float32)
    assert isinstance(heuristic(132, shape, 12288), kind)


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_few_rows_await_all_codes_where_registers_hold_them(rows):
    shape = Shape(rows, 2048, 8192, 4, 64, 2, jnp.float32)
    alone, beside = (heuristic(132, shape, 8192, beside=beside) for beside in (False, True))
    assert isinstance(alone, FewRows) and isinstance(beside, FewRows)
    assert (alone.awaited, beside.awaited) == (True, rows < 4)


@pytest.mark.parametrize(
    ("rows", "bits", "group_units", "outputs"),
    [(16, 4, 2, 32), (17, 4, 2, 64), (32, 3, 4, 64), (8, 3, 1, 64), (33, 4, 2, 32), (32, 8, 2, 32)],
)
def test_programs_of_a_head_have_more_outputs_where_registers_hold_them(
    rows, bits, group_units, outputs
):
    """Columns of tensor cores are rows, or at 3 bits rows of each group of a block."""
    shape = Shape(rows, 2048, 248320, bits, 64, group_units, jnp.float32)
    assert heuristic(132, shape, 248320).outputs == outputs
    assert heuristic(132, shape, 12288).outputs == 32


@pytest.mark.parametrize("group_size", layout.GROUP_SIZES)
@pytest.mark.parametrize("bits", layout.BITS)
def test_inputs_of_some_rows_fit_tensor_cores_and_the_smallest_shared_memory(bits, group_size):
    small_device = Target("gpu", "NVIDIA GeForce RTX 4090", 128, (8, 9))
    for rows in range(5, SOME_ROWS + 1):
        shape = Shape(rows, 2048, 12288, bits, 64, group_size // 32, jnp.float32)
        config = heuristic(small_device.cores, shape, 12288)
        columns = config.rows * tile.copies(shape)
        assert columns >= 8
        ahead = 2 * columns * config.units * layout.UNIT * (config.num_stages - 1)
        assert ahead < 0.9 * small_device.shared_memory
