"""`flash_attention` against the formula, query by query in float64."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.flash_attention import flash_attention, reference

run = jax.jit(flash_attention, static_argnames="window")


def attention(q, k, v, window=None):
    """Softmax attention of one query after the other."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    batch, length, heads, width = q.shape
    group = heads // k.shape[2]
    result = np.zeros(q.shape)
    for b, t, n in np.ndindex(batch, length, heads):
        first = 0 if window is None else max(0, t - window + 1)
        keys, values = (x[b, first : t + 1, n // group] for x in (k, v))
        scores = keys @ q[b, t, n] / np.sqrt(width)
        weights = np.exp(scores - scores.max())
        result[b, t, n] = weights @ values / weights.sum()
    return result


@pytest.mark.parametrize(
    ("length", "window"),
    [(1, None), (63, None), (64, 1), (65, 7), (200, 64), (515, None), (515, 7)],
)
def test_matches_the_formula(normal, length, window):
    q, k, v = normal(2, length, 4, 8), normal(2, length, 2, 8), normal(2, length, 2, 8)
    mixed = run(q, k, v, window=window)
    np.testing.assert_allclose(mixed, attention(q, k, v, window), atol=2e-6)


@pytest.mark.parametrize("shape", [(3, 5, 6, 1, 4), (4, 4, 4, 4, 4), (1, 7, 12, 4, 2)])
def test_heads_read_their_own_key_head(normal, shape):
    batch, length, heads, kv_heads, width = shape
    q, k, v = (normal(batch, length, n, width) for n in (heads, kv_heads, kv_heads))
    np.testing.assert_allclose(run(q, k, v), attention(q, k, v), atol=2e-6)


@pytest.mark.parametrize(("length", "window"), [(64, None), (100, None), (100, 5)])
def test_tiles_of_queries_join(monkeypatch, normal, length, window):
    monkeypatch.setattr(reference, "QUERY_TILE", 32)
    q, k, v = normal(1, length, 2, 4), normal(1, length, 1, 4), normal(1, length, 1, 4)
    tiled = jax.jit(functools.partial(flash_attention, window=window))(q, k, v)
    np.testing.assert_allclose(tiled, attention(q, k, v, window), atol=2e-6)


def test_later_tokens_are_not_seen(normal):
    q, k, v = normal(1, 65, 4, 8), normal(1, 65, 2, 8), normal(1, 65, 2, 8)
    before = np.asarray(run(q, k, v))
    for x in (q, k, v):
        x[:, 40:] = 1e30
    np.testing.assert_array_equal(np.asarray(run(q, k, v))[:, :40], before[:, :40])


def test_large_scores_stay_finite(normal):
    q, k, v = 1e3 * normal(1, 65, 4, 8), 1e3 * normal(1, 65, 2, 8), normal(1, 65, 2, 8)
    # The largest scores are near 1e7, so float32 tells them apart to about 1.
    mixed = np.asarray(run(q, k, v))
    assert np.isfinite(mixed).all()
    wrong = np.abs(mixed - attention(q, k, v)).max(axis=-1) > 1e-3
    assert wrong.mean() < 0.01


def test_bfloat16_is_rounded_to_the_end_only(normal):
    q, k, v = (jnp.asarray(normal(2, 200, n, 16), jnp.bfloat16) for n in (4, 2, 2))
    mixed = run(q, k, v)
    assert mixed.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(mixed, np.float32), attention(q, k, v), atol=0.02)


@pytest.mark.parametrize("window", [None, 7])
def test_gradient(check_gradient, normal, window):
    function, oracle = (functools.partial(f, window=window) for f in (flash_attention, attention))
    check_gradient(function, oracle, normal(1, 33, 4, 8), normal(1, 33, 2, 8), normal(1, 33, 2, 8))
