"""Text in chunks, and loops with observers, against whole forward passes of a random model."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from qwen_jax import CausalLM, QwenConfig, init_cache
from qwen_jax.decode import DecodeState, Observer, init_state, prefill_prompts
from qwen_jax.decode.loop import run_steps
from qwen_jax.errors import RequestError
from qwen_jax.model import RoutingTrace
from qwen_jax.research import (
    Piece,
    RoutingCounts,
    RoutingRecorder,
    collect,
    statistics,
    trace_of,
    trace_text,
)
from tests.qwen_jax.conftest import TINY

LENGTHS = (37, 5, 16, 21, 1)
SEQUENCES = [np.random.default_rng(n).integers(0, 61, n).tolist() for n in LENGTHS]
CHUNK = 16
PROMPTS, LIMITS = [[5, 9, 33], [7]], [9, 4]


@pytest.fixture(scope="module")
def whole(tiny: CausalLM) -> RoutingTrace:
    """All sequences in one forward pass without a cache."""
    tokens = np.zeros((len(LENGTHS), max(LENGTHS)), np.int32)
    for row, sequence in enumerate(SEQUENCES):
        tokens[row, : len(sequence)] = sequence
    output = tiny(tokens, np.array(LENGTHS))
    return trace_of(tiny.config, output.routing, tokens, np.array(LENGTHS))


@pytest.fixture(scope="module")
def pieces(tiny: CausalLM) -> list[Piece]:
    """The same in chunks, two sequences at a time; counts are copied before they are donated."""
    found = trace_text(
        tiny, SEQUENCES, capture="full", probabilities=True, batch_size=2, chunk_size=CHUNK
    )
    return [piece._replace(counts=jax.device_get(piece.counts)) for piece in found]


def test_chunks_are_those_of_a_whole_pass(pieces, whole):
    assert [len(piece.trace) for piece in pieces] == [21, 16, 5, 32, 5, 1]
    found = collect(pieces).trace
    assert found is not None
    for name in ("ids", "tokens", "sequences"):
        np.testing.assert_array_equal(getattr(found, name), getattr(whole, name))
    np.testing.assert_allclose(found.weights, whole.weights, atol=1e-5)
    np.testing.assert_allclose(found.logits, whole.logits, atol=1e-4)


def test_counts_are_those_of_the_trace(pieces, whole):
    counts = collect(pieces).counts
    assert int(counts.tokens) == sum(LENGTHS)
    np.testing.assert_array_equal(counts.chosen, statistics.counts_of(whole.ids, 6))
    odds = np.exp(np.asarray(whole.logits, np.float64))
    odds = (odds / odds.sum(-1, keepdims=True)).sum(1)
    np.testing.assert_allclose(counts.probability, odds, rtol=1e-4)


def test_counts_alone_bring_nothing_to_the_host(tiny, pieces):
    # By the program that is compiled already but for what it returns.
    found = collect(trace_text(tiny, SEQUENCES[:2], capture="none", batch_size=2, chunk_size=CHUNK))
    assert found.trace is None and found.counts.probability is None
    np.testing.assert_array_equal(found.counts.chosen, pieces[2].counts.chosen)


@pytest.mark.parametrize(
    ("sequences", "options", "words"),
    [
        ([], {}, "no sequence"),
        ([[1], []], {}, "prompt 1 is empty"),
        ([[61]], {}, "id 61 is outside"),
        ([[1] * 513], {}, "sequence 0 has 513 tokens"),
        ([[1]], {"batch_size": 0}, "batch_size is 0"),
        ([[1]], {"chunk_size": 0}, "chunk_size is 0"),
    ],
)
def test_refusals(tiny, sequences, options, words):
    with pytest.raises(RequestError, match=words):
        trace_text(tiny, sequences, **options)
    with pytest.raises(RequestError, match="no piece"):
        collect([])


def test_a_dense_model_is_refused_before_anything_runs():
    dense = {k: v for k, v in TINY.items() if "expert" not in k and "moe" not in k}
    config = QwenConfig.from_hf(dense | {"model_type": "qwen3_5_text", "intermediate_size": 16})
    with pytest.raises(RequestError, match="no MoE layers"):
        trace_text(CausalLM(config), [[1]])


@dataclasses.dataclass(frozen=True)
class Loop:
    """A loop that two observers saw, and the routing of what it entered by a whole pass."""

    recorded: DecodeState
    counted: DecodeState
    whole: RoutingTrace
    entered: np.ndarray

    @property
    def expected(self) -> np.ndarray:
        """Ids [L, N, A] of the generated tokens that were entered, row by row."""
        return self.whole.ids[:, self.entered]


@pytest.fixture(scope="module")
def loop(tiny: CausalLM) -> Loop:
    def run(observer: Observer) -> DecodeState:
        cache = init_cache(tiny.config, 2, 32, block_size=8)
        logits, cache = prefill_prompts(tiny, cache, PROMPTS, chunk_size=CHUNK)
        limits = np.array(LIMITS, np.int32)
        state = init_state(logits, max_tokens=limits, observer=observer)
        return run_steps(tiny, cache, state)[0]

    empty = RoutingRecorder.empty(tiny.config, batch_size=2, steps=8, capture="full", slots=3)
    recorded = run(empty)
    counted = run(RoutingCounts.zeros(tiny.config, "full"))
    lengths = np.array([len(p) + n - 1 for p, n in zip(PROMPTS, LIMITS, strict=True)])
    tokens = np.zeros((2, lengths.max()), np.int32)
    entered = np.zeros(tokens.shape, bool)
    for row, prompt in enumerate(PROMPTS):
        made = np.asarray(recorded.tokens)[row, : LIMITS[row] - 1]
        tokens[row, : lengths[row]] = [*prompt, *made]
        entered[row, len(prompt) : lengths[row]] = True
    output = tiny(tokens, lengths)
    whole = trace_of(tiny.config, output.routing, tokens, lengths)
    valid = np.arange(tokens.shape[1])[None, :] < lengths[:, None]
    return Loop(recorded, counted, whole, entered[valid])


def test_recorder_sees_what_a_whole_pass_gives(tiny, loop):
    recorder = loop.recorded.observer
    assert isinstance(recorder, Observer)
    trace = recorder.trace(loop.recorded.tokens)
    assert trace.ids.shape == (2, 11, 3)
    np.testing.assert_array_equal(trace.ids[..., :2], loop.expected)
    # A third slot that this router does not have.
    assert (trace.ids[..., 2] == 6).all() and (trace.weights[..., 2] == 0).all()
    wanted = loop.whole.weights[:, loop.entered]
    np.testing.assert_allclose(trace.weights[..., :2], wanted, atol=1e-5)
    assert trace.logits is not None and loop.whole.logits is not None
    np.testing.assert_allclose(trace.logits, loop.whole.logits[:, loop.entered], atol=1e-4)
    np.testing.assert_array_equal(trace.tokens, loop.whole.tokens[loop.entered])
    np.testing.assert_array_equal(trace.sequences, [0] * 8 + [1] * 3)
    assert trace.fingerprint == loop.whole.fingerprint


def test_counts_see_what_the_recorder_sees(loop):
    np.testing.assert_array_equal(loop.counted.tokens, loop.recorded.tokens)
    counts = loop.counted.observer
    assert isinstance(counts, RoutingCounts) and int(counts.tokens) == 11
    np.testing.assert_array_equal(counts.chosen, statistics.counts_of(loop.expected, 6))


def test_recorder_refuses_what_it_cannot_hold(tiny, loop, no_type_checks):
    recorder = loop.recorded.observer
    short = dataclasses.replace(recorder, step=np.int32(9))
    with pytest.raises(RequestError, match=r"9 steps were observed, but .* for 8"):
        short.trace(loop.recorded.tokens)
    with pytest.raises(RequestError, match=r"tokens are \(2, 7\)"):
        recorder.trace(loop.recorded.tokens[:, :7])
    with pytest.raises(RequestError, match="steps is 0"):
        RoutingRecorder.empty(tiny.config, batch_size=2, steps=0)
    with pytest.raises(RequestError, match="capture is 'none'"):
        RoutingRecorder.empty(tiny.config, batch_size=2, steps=1, capture="none")
