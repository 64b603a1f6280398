"""Which places of inputs and results a program of slots that share tiles reads and writes."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dequant_matmul.config import SomeRows
from pallas_kernels.dequant_matmul.operands import Shape
from pallas_kernels.expert_dispatch import joint
from pallas_kernels.expert_dispatch.joint import Joint
from tests.pallas_kernels.places import Rows, access, load, touched

SLOTS, INPUTS, OUTPUTS = 6, 200, 40


@pytest.fixture(params=[(3, 1), (3, 2), (3, 4), (8, 2)], ids=str)
def each(request) -> Joint:
    """Of four copies of the inputs, two, or one."""
    bits, group_units = request.param
    shape = Shape(0, INPUTS, OUTPUTS, bits, -(-INPUTS // 32), group_units, jnp.float32)
    return Joint(shape, SomeRows(4, 32), [])


# Of a row that is not full, what there is no slot for is `SLOTS`.
MINE = jnp.asarray([1, 5, SLOTS, SLOTS])


@pytest.mark.parametrize("slots", [1, 3])
def test_inputs_of_slots_that_exist_are_read(monkeypatch, each, slots):
    monkeypatch.setattr(joint, "load", load)
    ref = Rows(*each.struct_of(SLOTS // slots).shape)
    for unit in range(0, ref.shape[1] // 32, 4):
        each.inputs(ref, MINE, slots)(unit, 128)
    each.of_rows(Rows(SLOTS, 1), MINE)


def test_results_of_slots_that_exist_are_written(monkeypatch, each):
    monkeypatch.setattr(joint.plt, "store", access)
    for first in range(0, OUTPUTS, 32):
        each.store_plainly(Rows(SLOTS, OUTPUTS), MINE, first, jnp.zeros((32, 4)))


def test_inputs_of_a_matrix_are_written_once_in_each_copy(monkeypatch, each):
    """And nothing where another copy, or another slot, has its own."""
    written = []
    monkeypatch.setattr(
        joint.plt, "store", lambda at, _, mask=None: written.append(touched(at, mask))
    )
    ref, copies = Rows(*each.struct_of(SLOTS).shape), each.turn.copies
    for first in range(0, INPUTS, 32):
        each.store(ref, MINE, first, jnp.zeros((32, 4), jnp.bfloat16))
    rows, counts = np.unique(np.concatenate(written) // ref.shape[1], return_counts=True)
    assert rows.tolist() == [c * SLOTS + slot for c in range(copies) for slot in (1, 5)]
    assert set(counts) == {INPUTS}
    assert len(np.unique(np.concatenate(written))) == 2 * copies * INPUTS
