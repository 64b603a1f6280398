"""What a step reads."""

from __future__ import annotations

import numpy as np
import pytest

from qwen_jax.errors import RequestError
from qwen_jax.train import Data, Training, joined


@pytest.fixture
def data() -> Data:
    return Data(np.arange(107, dtype=np.int32), rows=3, window=5, seed=4)


def test_an_epoch_reads_every_window_once(data):
    assert data.windows == 20
    assert data.steps_per_epoch == 20 / 3
    # Three epochs are 20 steps of 3 rows.
    starts = data.batches(0, 20).inputs[..., 0].reshape(3, 20)
    for epoch in starts:
        assert sorted(np.diff(np.sort(epoch))) == [5] * 19
    assert len({tuple(epoch % 5) for epoch in starts} | {tuple(epoch) for epoch in starts}) > 3


def test_targets_follow_their_inputs(data):
    batch = data.batches(2, 4)
    assert batch.inputs.shape == (4, 3, 5)
    np.testing.assert_array_equal(batch.targets, batch.inputs + 1)
    assert batch.targets.max() <= 106
    assert batch.scored.all()
    assert (batch.lengths == 5).all()


def test_a_step_reads_the_same_however_it_is_come_by(data):
    whole = data.batches(0, 12).inputs
    np.testing.assert_array_equal(data.batches(7, 1).inputs[0], whole[7])
    again = Data(data.tokens, 3, 5, seed=4)
    np.testing.assert_array_equal(again.batches(5, 3).inputs, whole[5:8])
    other = Data(data.tokens, 3, 5, seed=5)
    assert (other.batches(0, 12).inputs != whole).any()
    assert again.digest == data.digest
    assert len({data.digest, other.digest, Data(data.tokens[1:], 3, 5, 4).digest}) == 3


def test_documents_end_to_end():
    parts = [np.array([1, 2]), np.array([3])]
    assert joined(parts, 9).tolist() == [1, 2, 9, 3]
    assert joined(parts, None).tolist() == [1, 2, 3]


def test_refusals():
    with pytest.raises(RequestError, match="10 tokens; windows of 5 need 11"):
        Data(np.arange(10), 1, 5)
    with pytest.raises(RequestError, match="rows is 0"):
        Data(np.arange(100), 0, 5)
    # JAX makes the same key of 2^32 as of 0.
    for seed in (-1, 2**32):
        with pytest.raises(RequestError, match=f"seed is {seed}; accepted"):
            Data(np.arange(100), 1, 5, seed=seed)
        with pytest.raises(RequestError, match=f"seed is {seed}; accepted"):
            Training(seed=seed)
    with pytest.raises(RequestError, match="there is no text"):
        joined([], None)
