"""Counts and traces of one forward pass, against transformers' figures and plain loops."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen_jax import QwenConfig
from qwen_jax.decode import StepOutput
from qwen_jax.errors import RequestError
from qwen_jax.model import Routing
from qwen_jax.research import (
    RoutingCounts,
    join_traces,
    load_trace,
    save_trace,
    statistics,
    trace_of,
)
from tests.qwen_jax.research.conftest import SMALL

CONFIG = QwenConfig.from_hf(SMALL)
DENSE = dataclasses.replace(CONFIG, mlp_only_layers=(0, 1))


@pytest.fixture(scope="module")
def demo_rows(demo_expected):
    """Lengths of the prompts of `demo_output`, and which of them are the row of n515."""
    lengths = np.array([len(prompt) for prompt in demo_expected.prompts.values()])
    return lengths, list(demo_expected.prompts).index("n515")


@pytest.fixture(scope="module")
def demo_counts(demo, demo_output, demo_rows) -> RoutingCounts:
    lengths, row = demo_rows
    valid = np.zeros(demo_output.logits.shape[:2], bool)
    valid[row, : lengths[row]] = True
    counts = RoutingCounts.zeros(demo[0].config, "full")
    return jax.jit(RoutingCounts.add)(counts, demo_output.routing, jnp.asarray(valid))


def test_counts_are_those_of_transformers(demo_counts, demo_expected):
    # No gap between the last expert chosen and the first not chosen is below 1e-5 here.
    np.testing.assert_array_equal(demo_counts.chosen, demo_expected.arrays["n515.expert_counts"])
    assert int(demo_counts.tokens) == 515
    np.testing.assert_allclose(np.asarray(demo_counts.weight).sum(1), 515, rtol=1e-5)
    np.testing.assert_allclose(np.asarray(demo_counts.probability).sum(1), 515, rtol=1e-5)


def test_pooled_loss_is_that_of_transformers(demo_counts, demo_expected):
    loss = statistics.pooled_balance_loss(demo_counts)
    assert abs(loss - demo_expected.values["aux_loss_n515"]) < 1e-5


def test_trace_leaves_padding_out(demo, demo_output, demo_rows, demo_expected):
    lengths, row = demo_rows
    tokens = np.zeros(demo_output.logits.shape[:2], np.int32)
    for number, prompt in enumerate(demo_expected.prompts.values()):
        tokens[number, : len(prompt)] = prompt
    trace = trace_of(demo[0].config, demo_output.routing, tokens, lengths)
    assert len(trace) == lengths.sum() and trace.ids.max() < trace.experts
    own = trace.sequences == row
    np.testing.assert_array_equal(trace.tokens[own], demo_expected.prompts["n515"])
    chosen = statistics.counts_of(trace.ids[:, own], trace.experts)
    np.testing.assert_array_equal(chosen, demo_expected.arrays["n515.expert_counts"])
    # Logits are raw: softmax of them gives the weights, which sum to 1 where they do not.
    assert trace.logits is not None
    assert np.abs(trace.logits.sum(-1) - 1).max() > 1
    logits = trace[2].logits
    assert logits is not None
    wide = np.exp(np.asarray(logits, np.float64))
    best = np.take_along_axis(wide, trace[2].ids, 1)
    weights = best / best.sum(-1, keepdims=True)
    np.testing.assert_allclose(trace[2].weights, weights, atol=1e-6)


def routing(seed: int, slots: int = 2, rows: int = 3, tokens: int = 5) -> Routing:
    random = np.random.default_rng(seed)
    ids = random.random((rows, tokens, CONFIG.num_experts)).argsort(-1)[..., :slots]
    logits = random.normal(0, 2, (rows, tokens, CONFIG.num_experts))
    weights = random.random(ids.shape)
    arrays = (
        jnp.asarray(ids, jnp.int32),
        *(jnp.asarray(a, jnp.float32) for a in (weights, logits)),
    )
    return Routing(*arrays)


VALID = np.arange(5)[None, :] < np.array([5, 2, 0])[:, None]


@pytest.mark.parametrize("few", [1024, 0])
def test_sums_are_those_of_a_loop(few, monkeypatch):
    """By one-hot codes, as for a step of a loop, and by adding slot for slot."""
    monkeypatch.setattr("qwen_jax.research.counts._FEW_SLOTS", few)
    # The second layer's router has other slots: its missing ones are empty.
    layers = {0: routing(1), 1: routing(2, slots=3)}
    counts = RoutingCounts.zeros(CONFIG, "full")
    for _ in range(2):
        counts = counts.add(layers, jnp.asarray(VALID))
    assert int(counts.tokens) == 2 * VALID.sum()
    for layer, choice in layers.items():
        chosen, weight, probability = np.zeros((3, CONFIG.num_experts))
        for row, column in zip(*np.nonzero(VALID), strict=True):
            for slot, expert in enumerate(np.asarray(choice.ids)[row, column]):
                chosen[expert] += 2
                weight[expert] += 2 * float(choice.weights[row, column, slot])
            assert choice.logits is not None
            odds = np.exp(np.asarray(choice.logits[row, column], np.float64))
            probability += 2 * odds / odds.sum()
        np.testing.assert_array_equal(counts.chosen[layer], chosen)
        np.testing.assert_allclose(counts.weight[layer], weight, rtol=1e-5)
        assert counts.probability is not None
        np.testing.assert_allclose(counts.probability[layer], probability, rtol=1e-5)


def test_ids_alone():
    layers = {layer: routing(layer).captured("ids") for layer in range(2)}
    counts = RoutingCounts.zeros(CONFIG).add(layers, jnp.asarray(VALID))
    assert counts.probability is None and counts.capture == "ids"
    with pytest.raises(RequestError, match=r'no logits.*"full"'):
        RoutingCounts.zeros(CONFIG, "full").add(layers, jnp.asarray(VALID))


def test_a_prompt_is_no_step():
    output = StepOutput(jnp.zeros((3, 61)), {layer: routing(layer) for layer in range(2)})
    with pytest.raises(RequestError, match=r"one token a row, this output \[5\].*counts.add"):
        RoutingCounts.zeros(CONFIG).observe(output, jnp.ones((3,), jnp.bool_))


def test_many_tokens_need_no_memory_for_one_hot_codes(optimised):
    config = dataclasses.replace(CONFIG, num_experts=64, num_experts_per_tok=8)
    rows, tokens = 4, 2048
    shape = (rows, tokens, 8)
    choice = Routing(*(jax.ShapeDtypeStruct(shape, dtype) for dtype in (jnp.int32, jnp.float32)))
    valid = jax.ShapeDtypeStruct(shape[:2], jnp.bool_)
    counts = jax.eval_shape(lambda: RoutingCounts.zeros(config))
    compiled = jax.jit(RoutingCounts.add).lower(counts, {0: choice, 1: choice}, valid).compile()
    codes = 2 * np.prod(shape) * config.num_experts
    # Ids and weights of both layers as one, and little else.
    temporary = compiled.memory_analysis().temp_size_in_bytes
    assert temporary < 5 * 8 * np.prod(shape) < codes / 3


def test_dense_layers_are_absent():
    config = dataclasses.replace(CONFIG, mlp_only_layers=(0,))
    counts = RoutingCounts.zeros(config).add({1: routing(1)}, jnp.asarray(VALID))
    assert counts.layers == (1,) and counts.chosen.shape == (1, 6)
    trace = trace_of(config, {1: routing(1)}, np.zeros((3, 5), np.int32), VALID.sum(1))
    assert trace.layers == (1,) and trace.ids.shape == (1, 7, 2)
    with pytest.raises(RequestError, match="layer 0 has no routing"):
        trace[0]
    with pytest.raises(RequestError, match=r"layers \[0, 1\]"):
        counts.add({0: routing(1), 1: routing(1)}, jnp.asarray(VALID))


@pytest.mark.parametrize(
    "call",
    [
        lambda: RoutingCounts.zeros(DENSE),
        lambda: trace_of(DENSE, {}, np.zeros((1, 1), np.int32)),
        lambda: trace_of(CONFIG, {}, np.zeros((1, 1), np.int32)),
    ],
)
def test_no_moe_layers(call):
    with pytest.raises(RequestError, match="no MoE layers"):
        call()


def test_refusals(no_type_checks):
    with pytest.raises(RequestError, match=r"tokens are \(3, 4\)"):
        layers = {0: routing(1), 1: routing(2)}
        trace_of(CONFIG, layers, np.zeros((3, 4), np.int32))
    with pytest.raises(RequestError, match="capture is 'none'"):
        RoutingCounts.zeros(CONFIG, "none")
    layers, tokens = {0: routing(1), 1: routing(2)}, np.zeros((3, 5), np.int32)
    for lengths, words in (
        ([6, 1, 5], "from 1 to 6; accepted are 0 to 5"),
        ([-1, 1, 1], "from -1 to 1"),
    ):
        with pytest.raises(RequestError, match=words):
            trace_of(CONFIG, layers, tokens, np.array(lengths))
    with pytest.raises(RequestError, match=r"lengths of shape \(1,\)"):
        trace_of(CONFIG, layers, tokens, np.array([7]))
    with pytest.raises(RequestError, match="no trace to join"):
        join_traces([])


@pytest.fixture(scope="module")
def pieces():
    layers = {0: routing(1), 1: routing(2)}
    tokens = np.arange(15, dtype=np.int32).reshape(3, 5)
    rows = [trace_of(CONFIG, layers, tokens, VALID.sum(1)) for _ in range(2)]
    return [rows[0], dataclasses.replace(rows[1], tokens=rows[1].tokens + 20)]


def test_join_brings_sequences_together(pieces):
    joined = join_traces(pieces)
    np.testing.assert_array_equal(joined.sequences, [0] * 10 + [1] * 4)
    wanted = [0, 1, 2, 3, 4, 20, 21, 22, 23, 24, 5, 6, 25, 26]
    np.testing.assert_array_equal(joined.tokens, wanted)
    np.testing.assert_array_equal(joined.ids[:, :5], joined.ids[:, 5:10])
    assert joined.logits is not None
    np.testing.assert_array_equal(joined.logits[:, 10:12], joined.logits[:, 12:])
    with pytest.raises(RequestError, match="some pieces have logits"):
        join_traces([pieces[0], dataclasses.replace(pieces[1], logits=None)])


@pytest.mark.parametrize("full", [True, False])
def test_a_trace_is_stored_and_read(pieces, tmp_path, full):
    trace = pieces[0] if full else dataclasses.replace(pieces[0], logits=None)
    save_trace(tmp_path / "trace", trace, model="a model")
    assert [path.name for path in tmp_path.iterdir()] == ["trace"]
    # A model of one architecture, in another dtype and with other end tokens.
    config = dataclasses.replace(CONFIG, dtype="bfloat16", eos_token_id=(3,))
    found = load_trace(tmp_path / "trace", config)
    assert (found.layers, found.experts, found.fingerprint) == ((0, 1), 6, trace.fingerprint)
    jax.tree.map(np.testing.assert_array_equal, found, trace)


def test_traces_of_other_models_are_refused(pieces, tmp_path):
    save_trace(tmp_path / "trace", pieces[0], model="a model")
    other = dataclasses.replace(CONFIG, num_experts_per_tok=3)
    with pytest.raises(RequestError, match=r"another model, 'a model' .2 MoE layers of 6 experts"):
        load_trace(tmp_path / "trace", other)


@pytest.mark.parametrize("damage", ["absent", "cut", "other", "version", "range", "shape"])
def test_damaged_traces_are_refused(pieces, tmp_path, damage, no_type_checks):
    path = tmp_path / "trace"
    trace = pieces[0]
    if damage == "range":
        trace = dataclasses.replace(trace, ids=trace.ids + 5)
    if damage == "shape":
        trace = dataclasses.replace(trace, sequences=trace.sequences[1:])
    save_trace(path, trace)
    data = path.read_bytes()
    if damage == "absent":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(data[:-8])
    elif damage == "other":
        path.write_bytes(data.replace(b"routing trace", b"routing place"))
    elif damage == "version":
        path.write_bytes(data.replace(b'"format_version":"1"', b'"format_version":"2"'))
    words = {"other": "is of format", "version": "version '2'", "range": "damaged"}
    words |= {"absent": "not a trace", "cut": "not a trace", "shape": "damaged"}
    with pytest.raises(RequestError, match=words[damage]):
        load_trace(path)


def test_a_folder_is_no_trace(tmp_path):
    with pytest.raises(RequestError, match=f"{tmp_path} is a folder; give the file"):
        load_trace(tmp_path)
