"""`flash_attention` against the formula, query by query in float64."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.flash_attention import flash_attention, reference

run = jax.jit(flash_attention, static_argnames="window")


def attention(q, k, v, window=None):
    """Softmax attention of one query after the other."""
    q, k, v = (np.asarray(x).astype(np.float64) for x in (q, k, v))
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


def packed_attention(q, k, v, cu_seqlens, window=None):
    """The formula for each packed sequence; zero at padding."""
    result = np.zeros(q.shape)
    for first, stop in itertools.pairwise(cu_seqlens):
        tokens = slice(first, stop)
        result[:, tokens] = attention(q[:, tokens], k[:, tokens], v[:, tokens], window)
    return result


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("lengths", [(1,), (63, 64, 65), (0, 1, 0, 0, 199, 0), (515, 3), (1,) * 5])
def test_packed_sequences_do_not_see_each_other(normal, lengths, window):
    cu_seqlens = np.cumsum([0, *lengths]).astype(np.int32)
    length = cu_seqlens[-1] + 6
    q, k, v = normal(1, length, 4, 8), normal(1, length, 2, 8), normal(1, length, 2, 8)
    for x in (q, k, v):
        x[:, cu_seqlens[-1] :] = np.nan
    mixed = np.asarray(run(q, k, v, cu_seqlens, window=window))
    expected = packed_attention(q, k, v, cu_seqlens, window)
    np.testing.assert_allclose(mixed, expected, atol=2e-6)
    assert not mixed[:, cu_seqlens[-1] :].any()


def test_packed_sequences_of_no_token_are_zero(normal):
    q, k, v = normal(1, 5, 4, 8), normal(1, 5, 2, 8), normal(1, 5, 2, 8)
    assert not np.asarray(run(q, k, v, np.zeros(3, np.int32))).any()


def test_gradient_of_packed_sequences(check_gradient, normal):
    cu_seqlens = np.array([0, 20, 20, 31], np.int32)
    check_gradient(
        lambda q, k, v: flash_attention(q, k, v, jnp.asarray(cu_seqlens)),
        lambda q, k, v: packed_attention(q, k, v, cu_seqlens),
        *(normal(1, 33, 4, 8), normal(1, 33, 2, 8), normal(1, 33, 2, 8)),
    )


@pytest.mark.parametrize("window", [None, 7])
def test_gradient(check_gradient, normal, window):
    function, oracle = (functools.partial(f, window=window) for f in (flash_attention, attention))
    check_gradient(function, oracle, normal(1, 33, 4, 8), normal(1, 33, 2, 8), normal(1, 33, 2, 8))
