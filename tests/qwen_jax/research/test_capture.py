"""Text in chunks, and loops with observers, against whole forward passes of a random model."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jaxtyping import Array

from qwen_jax import CausalLM, QwenConfig, init_cache
from qwen_jax.decode import DecodeState, Observer, StepOutput, init_state, prefill_prompts
from qwen_jax.decode.loop import run_steps
from qwen_jax.errors import RequestError
from qwen_jax.model import Capture, RoutingTrace
from qwen_jax.pytree import pytree
from qwen_jax.research import (
    Piece,
    RoutingCounts,
    RoutingRecorder,
    collect,
    statistics,
    trace_of,
    trace_text,
)
from tests.qwen_jax.research.conftest import SMALL

SPARSE = SMALL | {"mlp_only_layers": [0]}
LENGTHS = (37, 5, 16, 21, 1)
SEQUENCES = [np.random.default_rng(n).integers(0, 61, n).tolist() for n in LENGTHS]
CHUNK = 16
PROMPTS, LIMITS = [[5, 9, 33], [7]], [9, 4]


@pytest.fixture(scope="module")
def sparse() -> CausalLM:
    """A random model whose second layer has experts, and the first has not."""
    random = np.random.default_rng(5)
    model = CausalLM(QwenConfig.from_hf(SPARSE))
    state = nnx.state(model)
    for _, leaf in nnx.to_flat_state(state):
        leaf.set_value(jnp.asarray(random.normal(0, 0.3, leaf.shape), jnp.float32))
    nnx.update(model, state)
    return model


@pytest.fixture(scope="module")
def whole(sparse: CausalLM) -> RoutingTrace:
    """All sequences in one forward pass without a cache."""
    tokens = np.zeros((len(LENGTHS), max(LENGTHS)), np.int32)
    for row, sequence in enumerate(SEQUENCES):
        tokens[row, : len(sequence)] = sequence
    output = sparse(tokens, np.array(LENGTHS))
    return trace_of(sparse.config, output.routing, tokens, np.array(LENGTHS))


@pytest.fixture(scope="module")
def pieces(sparse: CausalLM) -> list[Piece]:
    """The same in chunks, two sequences at a time; counts are copied before they are donated."""
    found = trace_text(
        sparse, SEQUENCES, capture="full", probabilities=True, batch_size=2, chunk_size=CHUNK
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


def test_counts_alone_bring_nothing_to_the_host(sparse, pieces):
    # By the program that is compiled already but for what it returns.
    found = collect(
        trace_text(sparse, SEQUENCES[:2], capture="none", batch_size=2, chunk_size=CHUNK)
    )
    assert found.trace is None and found.counts.probability is None
    np.testing.assert_array_equal(found.counts.chosen, pieces[2].counts.chosen)


@pytest.mark.parametrize(
    ("sequences", "options", "words"),
    [
        ([], {}, "no sequence"),
        ([[1], []], {}, "prompt 1 is empty"),
        ([[61]], {}, "id 61 is outside"),
        ([[1] * 65], {}, "sequence 0 has 65 tokens"),
        ([1, 2], {}, "prompt 0 is 1; accepted is a list"),
        ([[1]], {"capture": "all"}, "capture is 'all'; accepted are"),
        ([[1]], {"batch_size": 0}, "batch_size is 0"),
        ([[1]], {"chunk_size": 0}, "chunk_size is 0"),
        ([[1]], {"chunk_size": 1.5}, "chunk_size is 1.5; accepted is a whole number"),
    ],
)
def test_refusals(sparse, sequences, options, words, no_type_checks):
    with pytest.raises(RequestError, match=words):
        trace_text(sparse, sequences, **options)
    with pytest.raises(RequestError, match="no piece"):
        collect([])


def test_a_dense_model_is_refused_before_anything_runs():
    config = QwenConfig.from_hf(SPARSE | {"mlp_only_layers": [0, 1]})
    with pytest.raises(RequestError, match="no MoE layers"):
        trace_text(CausalLM(config), [[1]])


@pytree
class Both:
    """Two observers of one loop."""

    recorder: RoutingRecorder
    counts: RoutingCounts
    capture: ClassVar[Capture] = "full"

    def observe(self, output: StepOutput, taken: Array) -> Both:
        return Both(self.recorder.observe(output, taken), self.counts.observe(output, taken))


@pytest.fixture(scope="module")
def loop(sparse: CausalLM) -> DecodeState:
    """A loop that both saw, after its end."""
    config = sparse.config
    recorder = RoutingRecorder.empty(config, batch_size=2, steps=8, capture="full", slots=3)
    observer = Both(recorder, RoutingCounts.zeros(config, "full"))
    assert all(isinstance(one, Observer) for one in (recorder, observer.counts))
    cache = init_cache(config, 2, 32, block_size=8)
    logits, cache = prefill_prompts(sparse, cache, PROMPTS, chunk_size=CHUNK)
    state = init_state(logits, max_tokens=np.array(LIMITS, np.int32), observer=observer)
    return run_steps(sparse, cache, state)[0]


@pytest.fixture(scope="module")
def expected(sparse: CausalLM, loop: DecodeState) -> RoutingTrace:
    """The routing of the generated tokens that were entered, by a whole pass over all of them."""
    # As many rows and columns as above, for which a program is compiled.
    tokens = np.zeros((len(LENGTHS), max(LENGTHS)), np.int32)
    lengths, entered = np.zeros(len(LENGTHS), np.int32), np.zeros(tokens.shape, bool)
    for row, (prompt, limit) in enumerate(zip(PROMPTS, LIMITS, strict=True)):
        lengths[row] = len(prompt) + limit - 1
        tokens[row, : lengths[row]] = [*prompt, *np.asarray(loop.tokens)[row, : limit - 1]]
        entered[row, len(prompt) : lengths[row]] = True
    routing = sparse(tokens, lengths).routing
    whole = trace_of(sparse.config, routing, tokens, lengths)
    kept = entered[np.arange(tokens.shape[1])[None, :] < lengths[:, None]]
    assert whole.logits is not None
    return dataclasses.replace(
        whole,
        ids=whole.ids[:, kept],
        weights=whole.weights[:, kept],
        logits=whole.logits[:, kept],
        tokens=whole.tokens[kept],
        sequences=whole.sequences[kept],
    )


def test_recorder_sees_what_a_whole_pass_gives(loop, expected):
    trace = loop.observer.recorder.trace(loop.tokens)
    assert trace.ids.shape == (1, 11, 3)
    np.testing.assert_array_equal(trace.ids[..., :2], expected.ids)
    # A third slot that this router does not have.
    assert (trace.ids[..., 2] == 6).all() and (trace.weights[..., 2] == 0).all()
    np.testing.assert_allclose(trace.weights[..., :2], expected.weights, atol=1e-5)
    np.testing.assert_allclose(trace.logits, expected.logits, atol=1e-4)
    np.testing.assert_array_equal(trace.tokens, expected.tokens)
    np.testing.assert_array_equal(trace.sequences, [0] * 8 + [1] * 3)
    assert (trace.fingerprint, trace.layers) == (expected.fingerprint, (1,))


def test_counts_of_a_loop(loop, expected):
    counts = loop.observer.counts
    assert int(counts.tokens) == 11
    np.testing.assert_array_equal(counts.chosen, statistics.counts_of(expected.ids, 6))


def test_recorder_refuses_what_it_cannot_hold(sparse, loop, no_type_checks):
    recorder = loop.observer.recorder
    short = dataclasses.replace(recorder, step=np.int32(9))
    with pytest.raises(RequestError, match=r"9 steps were observed, but .* for 8"):
        short.trace(loop.tokens)
    with pytest.raises(RequestError, match=r"tokens are \(2, 7\)"):
        recorder.trace(loop.tokens[:, :7])
    with pytest.raises(RequestError, match="steps is 0"):
        RoutingRecorder.empty(sparse.config, batch_size=2, steps=0)
    with pytest.raises(RequestError, match="capture is 'none'"):
        RoutingRecorder.empty(sparse.config, batch_size=2, steps=1, capture="none")
