"""The orders of inputs, against a loop over blocks, runs and threads."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dequant_matmul.turn import Turn


@pytest.mark.parametrize("turn", [Turn(8), Turn(32), Turn(32, run=8), Turn(8, run=8)], ids=str)
def test_turned_inputs_and_their_places(turn):
    blocks = 128 * 3 // (4 * turn.width)
    columns = [
        (block * 4 + thread) * turn.width + run + value
        for block in range(blocks)
        for run in range(0, turn.width, turn.run)
        for thread in range(4)
        for value in range(turn.run)
    ]
    x = np.random.default_rng(0).standard_normal((3, 384)).astype(np.float32)
    np.testing.assert_array_equal(turn.turned(jnp.asarray(x), 4), x[:, columns])
    places = jnp.arange(384)
    np.testing.assert_array_equal(turn.column_of(places), columns)
    np.testing.assert_array_equal(turn.place_of(jnp.asarray(columns)), places)
