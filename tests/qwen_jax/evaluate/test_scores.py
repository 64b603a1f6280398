"""Perplexity and divergence against float64 formulas, plain model calls, and transformers."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy.special import rel_entr

from benchmarks.parity import Expected
from qwen_jax.errors import RequestError
from qwen_jax.evaluate import Document, Scores, Windows, divergence, perplexity, score
from qwen_jax.evaluate.divergence import kl_terms

GOLDEN = Path(__file__).parents[2] / "golden"


def test_loss_of_the_demo_is_that_of_transformers(demo, demo_expected: Expected):
    """On one of the stored prompts."""
    prompt = Document("n200", np.array(demo_expected.prompts["n200"], np.int32))
    expected = -demo_expected.arrays["n200.next_token_logprob"].astype(np.float64)
    result = perplexity(score(demo[0], Windows([prompt], window=200), batch_size=1))
    assert result.tokens == 199
    assert abs(result.mean_nll - expected.mean()) < 1e-5
    assert result.perplexity == pytest.approx(np.exp(expected.mean()), rel=1e-5)
    assert result.standard_error == pytest.approx(expected.std(ddof=1) / 199**0.5, rel=1e-4)


@pytest.mark.slow
def test_loss_of_the_demo_on_held_out_text(demo, demo_expected: Expected):
    text = Document("held out", np.load(GOLDEN / "demo.eval_tokens.npy").astype(np.int32))
    result = perplexity(score(demo[0], Windows([text], window=512, max_windows=16)))
    assert result.tokens == 16 * 511
    assert abs(result.mean_nll - demo_expected.values["eval_nll_16x512"]) < 1e-5


def test_strided_windows_are_plain_calls_of_the_model(sparse, random_text, log_softmax):
    """Uneven windows in one padded batch against calls without padding."""
    text = random_text(45)
    windows = Windows([text], window=20, stride=15)
    expected = []
    for begin, first in ((0, 1), (15, 5), (30, 5)):
        ids = text.tokens[begin : begin + 20]
        logs = log_softmax(sparse(ids[None]).logits)[0]
        expected += [-logs[i - 1, ids[i]] for i in range(first, len(ids))]
    result = perplexity(score(sparse, windows, batch_size=2))
    assert result.tokens == len(expected) == 44
    assert result.mean_nll == pytest.approx(np.mean(expected), abs=1e-6)


def test_a_model_does_not_diverge_from_itself(sparse, random_text):
    windows = Windows([random_text(45)], window=20, stride=15)
    base, other = (score(sparse, windows, batch_size=2) for _ in range(2))
    result = divergence(base, other)
    assert (result.mean_kl, result.max_kl, result.standard_error) == (0, 0, 0)
    assert (result.top1_agreement, result.perplexity_ratio) == (1, 1)


def both(base: np.ndarray, other: np.ndarray, targets: np.ndarray) -> tuple[list[Scores], ...]:
    """Scores of log-probabilities [N, V]."""

    def scores(values: np.ndarray) -> list[Scores]:
        filled = np.zeros((256, values.shape[1]), np.float32)
        filled[: len(values)] = values
        numbers = np.zeros(len(values), np.int32)
        return [Scores(jnp.asarray(filled), targets, numbers, str)]

    return scores(base), scores(other)


def test_divergence_is_the_formula(log_softmax):
    random = np.random.default_rng(0)
    logits = random.normal(0, 3, (100, 61))
    base, other = log_softmax(logits), log_softmax(logits + random.normal(0, 0.5, (100, 61)))
    targets = random.integers(0, 61, 100).astype(np.int32)
    result = divergence(*both(base, other, targets))

    kl = rel_entr(np.exp(base), np.exp(other)).sum(-1)
    assert result.mean_kl == pytest.approx(kl.mean(), rel=1e-5)
    assert result.standard_error == pytest.approx(kl.std(ddof=1) / 10, rel=1e-4)
    assert result.median_kl == pytest.approx(np.median(kl), rel=1e-5)
    assert result.p99_kl == pytest.approx(np.percentile(kl, 99), rel=1e-5)
    assert result.max_kl == pytest.approx(kl.max(), rel=1e-5)
    same = np.argmax(base, -1) == np.argmax(other, -1)
    assert 0.5 < result.top1_agreement == same.mean() < 1
    rows = np.arange(100)
    losses = -base[rows, targets].mean(), -other[rows, targets].mean()
    assert result.perplexity_ratio == pytest.approx(np.exp(losses[1] - losses[0]), rel=1e-5)
    assert result.base.mean_nll == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.parametrize("size", [1e-4, 1e-2, 1.0, 30.0])
def test_divergence_is_exact_for_near_and_far_distributions(size, log_softmax):
    """Float32 log-probabilities with errors of 1e-6 in their normalisers, over a wide range."""
    random = np.random.default_rng(1)
    logits = random.normal(0, 3, (50, 2000))
    base = log_softmax(logits)
    other = log_softmax(logits + random.normal(0, size, logits.shape))
    noise = random.uniform(-1e-6, 1e-6, (2, 50, 1))
    rounded = jnp.float32(base + noise[0]), jnp.float32(other + noise[1])
    found = np.asarray(jnp.sum(kl_terms(*rounded), -1), np.float64)
    expected = rel_entr(np.exp(base), np.exp(other)).sum(-1)
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found, expected, rtol=2e-3)
    assert (np.asarray(kl_terms(*rounded)) >= -1e-12).all()


def test_nan_logits_name_the_window(sparse, random_text):
    broken = nnx.clone(sparse)
    table = broken.embed_tokens.weight
    table.set_value(table[...].at[60].set(jnp.nan))
    text = random_text(80)
    windows = Windows([text], window=20)
    perplexity(score(broken, windows, batch_size=2))
    text.tokens[45] = 60
    with pytest.raises(FloatingPointError, match=r"mine: .* window 2 \(tokens 40 to 59 of random"):
        perplexity(score(broken, windows, batch_size=2), what="mine")
    with pytest.raises(FloatingPointError, match="other: NaN or infinite logits in window 2"):
        divergence(score(sparse, windows, batch_size=2), score(broken, windows, batch_size=2))
    text.tokens[45] = 0


def test_windows_beyond_the_context_and_different_windows_are_refused(sparse, random_text):
    with pytest.raises(RequestError, match="window is 80, but the model's context is 64"):
        score(sparse, Windows([random_text(90)], window=80))
    first, _ = both(np.zeros((3, 5)), np.zeros((3, 5)), np.zeros(3, np.int32))
    second, _ = both(np.zeros((4, 5)), np.zeros((4, 5)), np.zeros(4, np.int32))
    with pytest.raises(ValueError, match="different windows"):
        divergence(first, second)
