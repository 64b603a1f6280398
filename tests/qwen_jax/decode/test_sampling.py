"""The sampling rule against transformers' processors, plain formulas, and counts of draws."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen_jax.decode import DecodeState, SamplingOptions, SamplingParams, init_state, sample
from qwen_jax.decode.sampling import LARGEST_SEED, keep_likely, penalise
from qwen_jax.decode.state import advance
from qwen_jax.errors import RequestError

GOLDEN = Path(__file__).parents[2] / "golden"
CASES: dict[str, dict[str, Any]] = json.loads((GOLDEN / "sampling.json").read_text())["cases"]
FIELDS = {field.name for field in dataclasses.fields(SamplingOptions)}
FOUR = np.log(np.array([[0.5, 0.3, 0.15, 0.05]], np.float32))

# One shape for almost everything here: each further one compiles for a second or two.
ROWS, VOCABULARY, CAPACITY = 6, 50, 40

Options = SamplingOptions | Sequence[SamplingOptions]
History = Sequence[Sequence[int]]

jit_sample, jit_penalise = jax.jit(sample), jax.jit(penalise)
jit_advance = jax.jit(advance, static_argnames="sample")
jit_start = jax.jit(init_state, static_argnames=("capacity", "sample"))


@jax.jit
def distribution(logits: jax.Array, state: DecodeState) -> jax.Array:
    """What tokens are drawn with, by the functions under test."""
    return jax.nn.softmax(keep_likely(penalise(logits, state), state.sampling), axis=-1)


def padded(logits: np.ndarray) -> jax.Array:
    """The logits, with tokens that cannot be drawn and rows that do not matter behind them."""
    full = np.full((ROWS, VOCABULARY), -3e38, np.float32)
    full[:, 0] = 0.0
    full[: logits.shape[0], : logits.shape[1]] = logits
    return jnp.asarray(full)


def state_for(
    options: Options, prompt: History = (), output: History = (), *, rows: int = ROWS
) -> DecodeState:
    """The state before a draw, of rows with this history; rows without options are greedy."""
    given = [options] * rows if isinstance(options, SamplingOptions) else list(options)
    given += [SamplingOptions()] * (rows - len(given))
    seen = np.zeros((rows, VOCABULARY), np.bool_)
    for row, ids in enumerate(prompt):
        seen[row, list(ids)] = True
    made, count = np.zeros((rows, CAPACITY), np.int32), np.zeros(rows, np.int32)
    for row, ids in enumerate(output):
        made[row, : len(ids)], count[row] = ids, len(ids)
    zeros = jnp.zeros((rows,), jnp.int32)
    return DecodeState(
        tokens=jnp.asarray(made),
        logprobs=jnp.zeros((rows, CAPACITY), jnp.float32),
        count=jnp.asarray(count),
        last=zeros,
        reason=zeros,
        max_tokens=zeros + 100,
        stop_ids=jnp.zeros((0,), jnp.int32),
        vocab_size=jnp.asarray(VOCABULARY, jnp.int32),
        sampling=SamplingParams.stack(given),
        in_prompt=jnp.asarray(seen),
    )


def probabilities(
    logits: np.ndarray, options: Options, prompt: History = (), output: History = ()
) -> np.ndarray:
    """The distribution of each row, as wide as its logits."""
    found = distribution(padded(logits), state_for(options, prompt, output))
    return np.asarray(found)[: logits.shape[0], : logits.shape[1]]


def draw(
    logits: np.ndarray, options: Options, prompt: History = (), output: History = ()
) -> list[int]:
    """A token for each row."""
    state = state_for(options, prompt, output)
    return np.asarray(jit_sample(padded(logits), state))[: len(logits)].tolist()


def plain_probabilities(
    logits: np.ndarray, options: SamplingOptions, prompt: Sequence[int], output: Sequence[int]
) -> np.ndarray:
    """The same for one row, written down token by token in float64."""
    scores = logits.astype(np.float64)
    for token in {*prompt, *output}:
        penalty = options.repetition_penalty
        scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
    for token in set(output):
        count = list(output).count(token)
        scores[token] -= options.presence_penalty + options.frequency_penalty * count
    scores /= options.temperature
    ranking = sorted(range(len(scores)), key=lambda token: (-scores[token], token))
    kept = ranking[: options.top_k] if options.top_k > 0 else ranking
    weight = {token: np.exp(scores[token] - scores.max()) for token in kept}
    total, mass, nucleus = sum(weight.values()), 0.0, []
    for token in kept:
        if not nucleus or mass < options.top_p or options.top_p == 1:
            nucleus.append(token)
        mass += weight[token] / total
    nucleus = [token for token in nucleus if weight[token] >= options.min_p * weight[kept[0]]]
    result = np.zeros(len(scores))
    result[nucleus] = [weight[token] for token in nucleus]
    return result / result.sum()


@pytest.mark.parametrize("name", CASES)
def test_probabilities_equal_those_of_transformers(name):
    case = CASES[name]
    with np.load(GOLDEN / "sampling.npz") as arrays:
        logits = arrays[case.get("logits", "logits")]
        history, expected = arrays["history"][: len(logits)], arrays[f"{name}.probs"]
    options = SamplingOptions(**({"temperature": 1.0} | {k: case[k] for k in FIELDS & {*case}}))
    # The ids of the history are those of wider logits where there are four.
    prompt = history.tolist() if options.repetition_penalty != 1 else ()
    found = probabilities(logits, options, prompt)
    for row, (got, wanted) in enumerate(zip(found, expected, strict=True)):
        # transformers keeps all of a tie at the k-th place, and any of a tie at the top-p cut.
        if 0 < options.top_k < np.count_nonzero(wanted):
            assert np.count_nonzero(got) <= options.top_k
        elif row in case.get("top_p_tied_rows", []):
            np.testing.assert_allclose(np.sort(got), np.sort(wanted), atol=1e-6)
        else:
            np.testing.assert_array_equal(got > 0, wanted > 0)
            np.testing.assert_allclose(got, wanted, atol=1e-6)


OPTIONS = [
    SamplingOptions(temperature=1.0, top_k=5),
    SamplingOptions(temperature=0.7, top_p=0.9, min_p=0.02),
    SamplingOptions(temperature=1.3, top_k=30, top_p=0.73, repetition_penalty=1.4),
    SamplingOptions(temperature=2.0, presence_penalty=0.9, frequency_penalty=-0.4, min_p=0.3),
    SamplingOptions(temperature=0.4, top_k=1, frequency_penalty=0.3, repetition_penalty=0.6),
    SamplingOptions(temperature=1.0, top_p=0.2, presence_penalty=-1.5),
]


def random_rows(seed: int) -> tuple[np.ndarray, list[list[int]], list[list[int]]]:
    """Logits with ties, prompts and outputs."""
    random = np.random.default_rng(seed)
    logits = np.round(random.normal(0, 3, (ROWS, VOCABULARY)), 1).astype(np.float32)
    prompt = [random.integers(0, VOCABULARY, 8).tolist() for _ in range(ROWS)]
    output = [random.integers(0, VOCABULARY, 9).tolist() for _ in range(ROWS)]
    return logits, prompt, output


@pytest.mark.parametrize("seed", range(5))
def test_probabilities_equal_plain_formulas_with_options_per_row(seed):
    logits, prompt, output = random_rows(seed)
    found = probabilities(logits, OPTIONS, prompt, output)
    for row, got in enumerate(found):
        wanted = plain_probabilities(logits[row], OPTIONS[row], prompt[row], output[row])
        np.testing.assert_array_equal(got > 0, wanted > 0)
        np.testing.assert_allclose(got, wanted, atol=1e-6)


@pytest.mark.parametrize(
    ("top_p", "kept"),
    # At 0.8 transformers (where 0.5 + 0.3 rounds up to the cut) keeps two.
    [(0.0, 1), (1e-9, 1), (0.49, 1), (0.6, 2), (0.8, 2), (0.81, 3), (0.96, 4), (1.0, 4)],
)
def test_top_p_keeps_the_token_that_crosses_the_mass(top_p, kept):
    found = probabilities(FOUR, SamplingOptions(temperature=1.0, top_p=top_p))
    assert np.count_nonzero(found) == kept
    np.testing.assert_allclose(
        found[0, :kept], np.exp(FOUR[0, :kept]) / np.exp(FOUR[0, :kept]).sum(), rtol=1e-6
    )


def test_top_p_that_is_met_exactly_needs_no_further_token():
    """Probabilities that floats hold, so that no rounding decides."""
    logits = np.log(np.array([[0.5, 0.25, 0.125, 0.125]], np.float32))
    for top_p, kept in ((0.5, 1), (0.75, 2), (0.875, 3)):
        found = probabilities(logits, SamplingOptions(temperature=1.0, top_p=top_p))
        assert np.flatnonzero(found).tolist() == list(range(kept))


@pytest.mark.parametrize(
    ("top_k", "kept"), [(-1, 4), (0, 4), (1, 1), (3, 3), (4, 4), (5, 4), (10**12, 4)]
)
def test_top_k_limits_and_switches_off(top_k, kept):
    found = probabilities(FOUR, SamplingOptions(temperature=1.0, top_k=top_k))
    assert np.flatnonzero(found).tolist() == list(range(kept))


def test_top_k_keeps_exactly_k_of_a_tie_the_lower_ids():
    logits = np.array([[1.0, 3.0, 2.0, 2.0, 2.0, 0.0]], np.float32)
    found = probabilities(logits, SamplingOptions(temperature=1.0, top_k=3))
    assert np.flatnonzero(found).tolist() == [1, 2, 3]


@pytest.mark.parametrize(("min_p", "kept"), [(0.0, 4), (0.09, 4), (0.25, 3), (0.61, 1), (1.0, 1)])
def test_min_p_is_relative_to_the_likeliest(min_p, kept):
    found = probabilities(FOUR, SamplingOptions(temperature=1.0, min_p=min_p))
    assert np.count_nonzero(found) == kept


def test_min_p_of_one_keeps_all_that_are_likeliest():
    """As in transformers, which drops what is less likely, and nothing that is as likely."""
    logits = np.array([[1.0, 3.0, 3.0, 0.0]], np.float32)
    found = probabilities(logits, SamplingOptions(temperature=1.0, min_p=1.0))
    assert np.flatnonzero(found).tolist() == [1, 2]


def test_filters_never_keep_a_token_with_no_probability():
    logits = np.array([[0.0, -np.inf, 1.0, -np.inf]], np.float32)
    found = probabilities(logits, SamplingOptions(temperature=1.0, top_k=3, top_p=0.999))
    assert np.flatnonzero(found).tolist() == [0, 2]


@pytest.mark.parametrize("temperature", [0.0, 1e-320, 1e-42, 1e-38, 1e-20, 1e-4])
def test_temperatures_down_to_zero_take_the_best_token(temperature):
    logits, _, _ = random_rows(0)
    logits[:, 7] = logits.max(-1) + np.array([0.5, 0.01, 1, 2, 3, 4], np.float32)
    assert draw(logits, SamplingOptions(temperature=temperature, seed=1)) == [7] * ROWS


def test_greedy_takes_the_lower_id_of_a_tie():
    assert draw(np.array([[1.0, 3.0, 3.0, 0.0]], np.float32), SamplingOptions()) == [1]


def test_huge_temperature_is_uniform():
    found = probabilities(FOUR, SamplingOptions(temperature=1e300))
    np.testing.assert_allclose(found, 0.25)


def test_repetition_penalty_follows_the_sign_and_counts_a_token_once():
    logits = np.array([[2.0, -2.0, 1.0], [2.0, -2.0, 1.0]], np.float32)
    options = SamplingOptions(repetition_penalty=2.0)
    state = state_for(options, prompt=[[0, 0, 1], [1]], output=[[], [0, 0, 0, 1]])
    found = np.asarray(jit_penalise(padded(logits), state))[:2, :3]
    np.testing.assert_array_equal(found, [[1, -4, 1], [1, -4, 1]])


def test_presence_and_frequency_penalties_see_the_output_only():
    options = SamplingOptions(presence_penalty=0.5, frequency_penalty=0.25)
    state = state_for(options, prompt=[[0, 0, 0], [0]], output=[[1, 1], []])
    found = np.asarray(jit_penalise(padded(np.zeros((2, 3), np.float32)), state))[:2, :3]
    np.testing.assert_array_equal(found, [[0, -1, 0], [0, 0, 0]])


def test_drawn_tokens_enter_the_history():
    state = state_for(SamplingOptions(frequency_penalty=0.2))
    for _ in range(5):
        logits = padded(np.array([[3.0, 2.9, 2.0]], np.float32))
        state = jit_advance(state, logits, jnp.zeros((ROWS,), jnp.bool_), sample=sample)
    assert state.tokens[0, :5].tolist() == [0, 1, 0, 1, 0]
    assert state.occurrences[0, :3].tolist() == [3, 2, 0]


def test_logprobs_of_drawn_tokens_are_the_models_own():
    """Of temperature 1 without penalty and filter, over the ids that may be sampled."""
    logits, prompt, output = random_rows(4)
    options = [dataclasses.replace(each, seed=5) for each in OPTIONS]
    state = dataclasses.replace(
        state_for(options, prompt, output), vocab_size=jnp.int32(VOCABULARY - 3)
    )
    after = jit_advance(state, padded(logits), jnp.zeros((ROWS,), jnp.bool_), sample=sample)
    known = logits[:, : VOCABULARY - 3].astype(np.float64)
    own = known - np.log(np.exp(known).sum(-1, keepdims=True))
    count = np.asarray(state.count)
    for row, token in enumerate(np.asarray(after.last)):
        assert after.tokens[row, count[row]] == token < VOCABULARY - 3
        np.testing.assert_allclose(after.logprobs[row, count[row]], own[row, token], atol=1e-5)


def test_a_row_draws_the_same_alone_and_in_any_batch():
    logits, prompt, output = random_rows(11)
    options = [dataclasses.replace(o, seed=5) for o in OPTIONS]
    for _ in range(10):
        together = draw(logits, options, prompt, output)
        for row in range(ROWS):
            one = slice(row, row + 1)
            state = state_for(options[one], prompt[one], output[one], rows=1)
            alone = jit_sample(jnp.asarray(logits[one]), state)
            assert alone.tolist() == together[one]
            output[row].append(together[row])


def test_a_row_that_is_not_finite_leaves_the_others_alone():
    logits, prompt, output = random_rows(12)
    options = [dataclasses.replace(o, seed=5) for o in OPTIONS]
    expected = draw(logits, options, prompt, output)
    logits[2, 7] = np.nan
    found = draw(logits, options, prompt, output)
    assert found[:2] + found[3:] == expected[:2] + expected[3:]


@pytest.mark.parametrize("over", ["seeds", "steps"])
def test_draws_follow_the_probabilities(over):
    draws = 20_000
    logits = np.log(np.array([0.4, 0.3, 0.15, 0.1, 0.04, 0.01], np.float32))
    kept = np.exp(logits[:5])
    expected = draws * kept / kept.sum()
    many, zeros = np.arange(draws), np.zeros(draws)
    seed, count = (many, zeros) if over == "seeds" else (zeros + 3, many)
    row = SamplingParams.stack([SamplingOptions(temperature=1.0, top_k=5)])
    sampling = jax.tree.map(lambda leaf: jnp.repeat(leaf, draws, axis=0), row)
    state = dataclasses.replace(
        state_for(SamplingOptions()),
        sampling=dataclasses.replace(sampling, seed=jnp.asarray(seed.astype(np.uint32))),
        count=jnp.asarray(count.astype(np.int32)),
        tokens=jnp.zeros((draws, 1), jnp.int32),
        in_prompt=jnp.zeros((draws, 6), jnp.bool_),
    )
    drawn = jit_sample(jnp.repeat(jnp.asarray(logits)[None], draws, axis=0), state)
    counts = np.bincount(np.asarray(drawn), minlength=6)
    assert counts[5] == 0
    # Chi-square with 4 degrees of freedom: 23.5 is exceeded once in ten thousand.
    assert np.sum((counts[:5] - expected) ** 2 / expected) < 23.5


def test_rows_without_a_seed_differ_and_so_do_calls():
    options = [SamplingOptions(temperature=1.0)] * 8
    first, second = (SamplingParams.stack(options).seed.tolist() for _ in range(2))
    assert len({*first, *second}) == 16


def test_the_largest_seed_is_kept_whole():
    options = [SamplingOptions(seed=LARGEST_SEED), SamplingOptions(seed=0)]
    assert SamplingParams.stack(options).seed.tolist() == [LARGEST_SEED, 0]


def test_options_without_a_seed_are_refused_under_jit():
    def trace(options: SamplingOptions) -> None:
        start = functools.partial(init_state, max_tokens=1, sampling=options)
        jax.eval_shape(lambda logits: start(logits).last, padded(FOUR))

    with pytest.raises(RequestError, match="seed"):
        trace(SamplingOptions(temperature=1.0))
    trace(SamplingOptions(temperature=1.0, seed=0))
    trace(SamplingOptions())


def test_ids_beyond_the_tokenizer_are_never_sampled():
    logits = np.zeros((ROWS, VOCABULARY), np.float32)
    logits[:, 6:] = 50.0
    for seed in range(10):
        hot = [SamplingOptions(temperature=9.0, seed=10 * seed + row) for row in range(1, ROWS)]
        state = jit_start(
            jnp.asarray(logits),
            max_tokens=jnp.int32(1),
            capacity=1,
            sampling=SamplingParams.stack([SamplingOptions(), *hot]),
            vocab_size=jnp.int32(6),
        )
        assert int(jnp.max(state.last)) <= 5
        np.testing.assert_allclose(state.logprobs[:, 0], -np.log(6), rtol=1e-6)


def test_own_rules_do_not_see_ids_beyond_the_tokenizer_either():
    def last_finite(logits: jax.Array, state: DecodeState) -> jax.Array:
        ids = jnp.arange(VOCABULARY, dtype=jnp.int32)[None]
        return jnp.max(jnp.where(jnp.isfinite(logits), ids, 0), axis=-1)

    state = jit_start(
        jnp.zeros((ROWS, VOCABULARY)),
        max_tokens=jnp.int32(1),
        capacity=1,
        vocab_size=jnp.int32(6),
        sample=last_finite,
    )
    assert state.last.tolist() == [5] * ROWS
