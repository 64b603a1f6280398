"""Text and ids in, text and ids out."""

from __future__ import annotations

import copy
import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

import qwen_jax
from benchmarks.parity import run_prompts
from qwen_jax import CausalLM, GenerationResult, SamplingOptions
from qwen_jax.compile_time import compile_seconds
from qwen_jax.errors import RequestError
from qwen_jax.model.layers import Linear
from qwen_jax.research.interventions import shared_expert
from qwen_jax.text import Tokenizer

# One number of new tokens and few batch sizes, so that few programs are compiled.
NEW = 16
TEXTS = ["And Moses said unto", "import sys\n", "In the beginning"]
HOT = SamplingOptions(temperature=1.0, top_p=0.95, seed=3)


def half(model: CausalLM) -> CausalLM:
    """The last two layers of the demo, one of each kind: half the time to compile."""
    config = dataclasses.replace(
        model.config, num_hidden_layers=2, layer_types=model.config.layer_types[2:]
    )
    shorter = CausalLM(config)
    shorter.embed_tokens, shorter.norm = model.embed_tokens, model.norm
    shorter.lm_head, shorter.layers = model.lm_head, nnx.List(model.layers[2:])
    return shorter


@pytest.fixture(scope="module")
def model(demo: tuple[CausalLM, Tokenizer]) -> CausalLM:
    return half(demo[0])


@pytest.fixture(scope="module")
def tokenizer(demo: tuple[CausalLM, Tokenizer]) -> Tokenizer:
    return demo[1]


@pytest.fixture(scope="module")
def ids(tokenizer: Tokenizer) -> list[list[int]]:
    return [tokenizer.encode(text) for text in TEXTS]


@pytest.fixture(scope="module")
def greedy(model: CausalLM, tokenizer: Tokenizer) -> list[GenerationResult]:
    """The greedy continuation of each text, all in one batch."""
    return qwen_jax.generate(model, tokenizer, TEXTS, max_tokens=NEW)


def test_results_of_a_batch(model, tokenizer, ids, greedy):
    for row, result in enumerate(greedy):
        assert result.index == row
        assert result.prompt_tokens == len(ids[row])
        assert result.generation_tokens == len(result.tokens) == len(result.logprobs) == NEW
        assert result.finish_reason == "length"
        assert result.text == tokenizer.decode(result.tokens, skip_special_tokens=True)
        assert result.prompt_tps > 0
        assert result.generation_tps > 0
    assert len({result.text for result in greedy}) == 3


@pytest.mark.parametrize("row", range(3))
def test_a_prompt_gives_the_same_alone(model, tokenizer, greedy, row):
    alone = qwen_jax.generate(model, tokenizer, TEXTS[row], max_tokens=NEW)
    assert isinstance(alone, GenerationResult)
    assert alone.index == 0
    assert alone.tokens == greedy[row].tokens
    assert alone.text == greedy[row].text
    np.testing.assert_allclose(alone.logprobs, greedy[row].logprobs, atol=1e-4)


@pytest.mark.parametrize("form", [list, tuple, np.array, jax.numpy.asarray, np.uint16])
def test_ids_may_come_in_many_forms(model, tokenizer, ids, greedy, form):
    result = qwen_jax.generate(model, tokenizer, form(ids[0]), max_tokens=NEW)
    assert isinstance(result, GenerationResult)
    assert result.tokens == greedy[0].tokens


def test_a_batch_may_mix_text_and_ids(model, tokenizer, ids, greedy):
    mixed = [TEXTS[0], ids[1], np.array(ids[2])]
    results = qwen_jax.generate(model, tokenizer, mixed, max_tokens=NEW)
    assert [result.tokens for result in results] == [result.tokens for result in greedy]


def test_a_batch_of_one_is_a_list(model, tokenizer, ids, greedy):
    for batch in ([TEXTS[0]], [ids[0]], np.array([ids[0]])):
        (result,) = qwen_jax.generate(model, tokenizer, batch, max_tokens=NEW)
        assert result.tokens == greedy[0].tokens


def test_pieces_of_a_stream_join_to_the_result(model, tokenizer, greedy):
    stops = [greedy[1].text[9:12]]
    results = qwen_jax.generate(model, tokenizer, TEXTS, max_tokens=NEW, stop=stops)
    pieces = list(qwen_jax.stream_generate(model, tokenizer, TEXTS, max_tokens=NEW, stop=stops))
    for row, result in enumerate(results):
        mine = [piece for piece in pieces if piece.index == row]
        assert "".join(piece.text for piece in mine) == result.text
        assert [token for piece in mine for token in piece.tokens] == result.tokens
        np.testing.assert_array_equal([p.logprobs[0] for p in mine], result.logprobs)
        assert [piece.generation_tokens for piece in mine] == [*range(1, len(mine) + 1)]
        assert [piece.finish_reason for piece in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1].finish_reason == result.finish_reason
    assert results[1].finish_reason == "stop"


def test_logprobs_are_those_of_the_model(model, ids, greedy):
    texts = [prompt + result.tokens for prompt, result in zip(ids, greedy, strict=True)]
    logits = run_prompts(model, texts).logits
    for row, (prompt, result) in enumerate(zip(ids, greedy, strict=True)):
        there = logits[row, len(prompt) - 1 : len(prompt) - 1 + NEW]
        expected = np.asarray(jax.nn.log_softmax(there, axis=-1))
        assert expected.argmax(-1).tolist() == result.tokens
        np.testing.assert_allclose(result.logprobs, expected.max(-1), atol=1e-4)


@pytest.mark.parametrize("border", [1, 2, 4, 7, 11])
def test_stop_strings_are_found_across_tokens(model, tokenizer, greedy, border):
    """The end of one token and the beginning of the next make a stop string."""
    tokens = greedy[0].tokens
    pieces = [tokenizer.decode([token]) for token in tokens]
    stop = pieces[border - 1][-2:] + pieces[border][:2]
    result = qwen_jax.generate(
        model, tokenizer, TEXTS[0], max_tokens=NEW, stop=[stop, "never in this text"]
    )
    text = greedy[0].text
    end = text.index(stop)
    assert result.text == text[:end]
    assert result.finish_reason == "stop"
    # The last token is the one that completes the stop string.
    assert result.tokens == tokens[: len(result.tokens)]
    assert stop in tokenizer.decode(result.tokens)
    assert stop not in tokenizer.decode(result.tokens[:-1])
    assert len(result.logprobs) == len(result.tokens) == result.generation_tokens


def test_a_single_stop_string_and_none(model, tokenizer, greedy):
    stop = greedy[0].text[5:8]
    result = qwen_jax.generate(model, tokenizer, TEXTS[0], max_tokens=NEW, stop=stop)
    assert result.text == greedy[0].text[: greedy[0].text.index(stop)]
    for nothing in (None, (), []):
        result = qwen_jax.generate(model, tokenizer, TEXTS[0], max_tokens=NEW, stop=nothing)
        assert result.text == greedy[0].text


def test_text_that_might_have_begun_a_stop_string_is_shown_at_the_end(model, tokenizer, greedy):
    stop = greedy[0].text[-3:] + "never in this text"
    result = qwen_jax.generate(model, tokenizer, TEXTS[0], max_tokens=NEW, stop=stop)
    assert (result.text, result.finish_reason) == (greedy[0].text, "length")


def edit(path: Path, **fields: Any) -> None:
    path.chmod(0o644)
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.fixture(scope="module")
def ends(greedy: list[GenerationResult]) -> list[int]:
    """A token of each continuation that the others do not have."""
    rows = [result.tokens for result in greedy]
    return [
        next(t for t in row[3:] if not any(t in other for other in rows if other is not row))
        for row in rows
    ]


@pytest.fixture(scope="module")
def doctored(demo_path: Path, tokenizer: Tokenizer, ends: list[int], tmp_path_factory) -> Path:
    """The demo with another end token in each of its three files."""
    folder = tmp_path_factory.mktemp("doctored") / "model"
    shutil.copytree(demo_path, folder)
    folder.chmod(0o755)
    config = json.loads((folder / "config.json").read_text())
    edit(folder / "config.json", text_config=config["text_config"] | {"eos_token_id": ends[0]})
    edit(folder / "generation_config.json", eos_token_id=[4091, ends[1]])
    edit(folder / "tokenizer_config.json", eos_token=tokenizer.id_to_token(ends[2]))
    return folder


def test_end_tokens_of_all_files_stop(doctored, ends, greedy):
    model, tokenizer = qwen_jax.load(doctored, dtype="float32")
    assert model.config.eos_token_id == (ends[0], 4091, ends[1], ends[2])
    model = half(model)
    results = qwen_jax.generate(model, tokenizer, TEXTS, max_tokens=NEW)
    for row, result in enumerate(results):
        tokens = greedy[row].tokens
        assert result.finish_reason == "stop"
        assert result.tokens == tokens[: tokens.index(ends[row]) + 1]
        assert result.text == tokenizer.decode(result.tokens[:-1])
        assert result.generation_tokens == len(result.tokens)
    ignoring = qwen_jax.generate(model, tokenizer, TEXTS, max_tokens=NEW, ignore_eos=True)
    assert [result.tokens for result in ignoring] == [result.tokens for result in greedy]


def test_a_stop_string_may_be_a_special_token(model, tokenizer, greedy):
    """Its text is left out of what is generated, so that it is found by its id."""
    end = greedy[0].tokens[5]
    rows, special = np.array(model.lm_head.weight[...]), tokenizer.token_to_id("<|im_start|>")
    rows[[end, special]] = rows[[special, end]]
    swapped = copy.copy(model)
    swapped.lm_head = Linear(rows.shape[1], rows.shape[0], "float32")
    swapped.lm_head.weight.set_value(jax.numpy.asarray(rows))
    assert special not in model.config.eos_token_id
    options = {"max_tokens": NEW, "ignore_eos": True}
    stop = ["never in this text", "<|im_start|>"]
    result = qwen_jax.generate(swapped, tokenizer, TEXTS[0], stop=stop, **options)
    first = greedy[0].tokens.index(end)
    assert result.tokens == [*greedy[0].tokens[:first], special]
    assert result.text == tokenizer.decode(greedy[0].tokens[:first])
    assert result.finish_reason == "stop"
    with pytest.raises(RequestError, match=r"'<.im_end.>\\nX' has the special token '<.im_end.>'"):
        qwen_jax.generate(model, tokenizer, TEXTS[0], stop="<|im_end|>\nX", **options)


def test_ids_alone_need_no_tokenizer(model, ids, greedy):
    result = qwen_jax.generate(model, None, ids[0], max_tokens=NEW)
    assert (result.tokens, result.text) == (greedy[0].tokens, "")
    with pytest.raises(RequestError, match="prompt 1 is text, but this model folder has no tok"):
        qwen_jax.generate(model, None, [ids[0], TEXTS[0]])
    with pytest.raises(RequestError, match="stop strings need a tokenizer"):
        qwen_jax.generate(model, None, ids[0], stop="x")


def test_ids_beyond_the_tokenizer_are_never_sampled(model, tokenizer):
    narrow = copy.copy(tokenizer)
    narrow.__dict__["vocab_size"] = 300
    for options in (SamplingOptions(), SamplingOptions(temperature=5.0, seed=1)):
        result = qwen_jax.generate(model, narrow, TEXTS[0], max_tokens=NEW, sampling=options)
        assert max(result.tokens) < 300
        assert np.isfinite(result.logprobs).all()


def test_seeds_repeat_whatever_the_batch(model, tokenizer):
    options = [SamplingOptions(temperature=2.0, seed=8), HOT, SamplingOptions(temperature=1.5)]
    batch = qwen_jax.generate(model, tokenizer, TEXTS, max_tokens=NEW, sampling=options)
    again = qwen_jax.generate(model, tokenizer, TEXTS[1], max_tokens=NEW, sampling=HOT)
    assert again.text == batch[1].text
    other = SamplingOptions(temperature=1.0, top_p=0.95, seed=4)
    assert qwen_jax.generate(model, tokenizer, TEXTS[1], max_tokens=NEW, sampling=other) != again
    free = [
        qwen_jax.generate(
            model, tokenizer, TEXTS[1], max_tokens=NEW, sampling=SamplingOptions(temperature=1.0)
        )
        for _ in range(2)
    ]
    assert free[0].tokens != free[1].tokens


def test_a_repetition_penalty_sees_the_prompt(model, tokenizer, greedy):
    options = SamplingOptions(repetition_penalty=1e6)
    result = qwen_jax.generate(model, tokenizer, TEXTS[0], max_tokens=NEW, sampling=options)
    assert len({*tokenizer.encode(TEXTS[0]), *result.tokens}) == 4 + NEW
    assert result.tokens != greedy[0].tokens


def test_each_row_is_penalised_for_its_own_prompt(model, tokenizer, greedy):
    penalised = SamplingOptions(repetition_penalty=1e6)
    for row in range(len(TEXTS)):
        options = [penalised if other == row else SamplingOptions() for other in range(len(TEXTS))]
        results = qwen_jax.generate(model, tokenizer, TEXTS, max_tokens=NEW, sampling=options)
        seen = [*{*tokenizer.encode(TEXTS[row])}, *results[row].tokens]
        assert len({*seen}) == len(seen)
        for other in {*range(len(TEXTS))} - {row}:
            assert results[other].tokens == greedy[other].tokens


def test_keys_and_values_in_int8_are_close_and_not_the_same(model, ids, greedy):
    results = qwen_jax.generate(model, None, ids, max_tokens=NEW, kv_cache_dtype="int8")
    for result, exact in zip(results, greedy, strict=True):
        first = abs(result.logprobs[0] - exact.logprobs[0])
        assert 0 < first < 0.1


def test_the_cache_has_room_for_prompt_and_new_tokens(model, ids):
    """More than the 64 tokens of the smallest cache."""
    prompt = (ids[0] * 63)[:63]
    result = qwen_jax.generate(model, None, prompt, max_tokens=NEW, ignore_eos=True)
    assert len(result.tokens) == NEW


@pytest.mark.parametrize("part", ["prompt", "new tokens"])
def test_an_intervention_counts_for_prompt_and_new_tokens(model, ids, greedy, part):
    """Logprobs of one prompt, chunk by chunk, are those of one pass under the same changes."""
    prompt = (ids[0] * 20)[:20]
    positions = (0, 20) if part == "prompt" else (20, None)
    changed = shared_expert(model, 0.0, positions=positions)
    options = {"max_tokens": NEW, "ignore_eos": True, "prefill_chunk_size": 16}
    result = qwen_jax.generate(model, None, prompt, intervention=changed, **options)
    tokens = np.array([prompt + result.tokens], np.int32)
    logprobs = [
        np.asarray(jax.nn.log_softmax(model(tokens, intervention=each).logits, axis=-1))[0, 19:-1]
        for each in (changed, None)
    ]
    there = np.arange(NEW), result.tokens
    np.testing.assert_allclose(result.logprobs, logprobs[0][there], atol=1e-4)
    without = np.abs(logprobs[1][there] - result.logprobs)
    assert (without > 1e-3).any()


def test_no_new_tokens_is_an_empty_result(model, tokenizer):
    results = qwen_jax.generate(model, tokenizer, TEXTS, max_tokens=0)
    for row, result in enumerate(results):
        assert (result.text, result.tokens, result.logprobs) == ("", [], [])
        assert (result.finish_reason, result.generation_tokens) == ("length", 0)
        assert (result.prompt_tokens, result.index) == (len(tokenizer.encode(TEXTS[row])), row)


def test_without_max_tokens_the_context_is_filled(model, tokenizer, greedy):
    result = qwen_jax.generate(model, tokenizer, TEXTS[0], max_model_len=4 + NEW)
    assert result.tokens == greedy[0].tokens


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ("", {}, "prompt 0 is empty; give at least one token"),
        ([], {}, "prompt is empty; give text or at least one token id"),
        ([[]], {}, "prompt 0 is empty"),
        (["And", ""], {}, "prompt 1 is empty"),
        (np.zeros((0,), np.int32), {}, "prompt is empty"),
        ([5, 4096], {}, "prompt 0: id 4096 is outside the vocabulary; accepted are 0 to 4095"),
        ([[5], [-1]], {}, "prompt 1: id -1 is outside the vocabulary"),
        ([2**70], {}, "prompt 0 holds object values; accepted is a list of token ids"),
        ([1.5], {}, "prompt 0 holds float64 values"),
        ([True], {}, "prompt 0 holds bool values"),
        ([None], {}, "prompt 0 holds object values"),
        ([1, "And"], {}, "prompt 0 holds "),
        ([[1, [2]]], {}, "prompt 0 is nested"),
        (None, {}, "prompt is of type NoneType; accepted are text, a list of token ids, or a list"),
        (b"And", {}, "prompt is of type bytes"),
        (7, {}, "prompt is of type int"),
        ([[1], 2], {}, "prompt 1 is of type int"),
        ([[1], b"And"], {}, "prompt 1 is of type bytes"),
        ("\ud800", {}, "Unicode|UTF-8|surrogate"),
        (
            [1] * 9000,
            {},
            "a prompt of 9000 tokens and max_tokens 0 need 9000, but the context is 8",
        ),
        ([1] * 8000, {"max_tokens": 193}, "max_tokens 193 need 8193, but the context is 8192"),
        ([1] * 20, {"max_model_len": 20, "max_tokens": 1}, "need 21, but the context is 20"),
        ([1] * 21, {"max_model_len": 20, "max_tokens": 0}, "need 21, but the context is 20"),
        ([1], {"max_tokens": 10**9}, "max_tokens 1000000000 need 1000000001"),
        ([1], {"max_tokens": -1}, "max_tokens is -1; accepted is a whole number from 0 on"),
        ([1], {"max_tokens": 1.5}, "max_tokens is 1.5"),
        ([1], {"max_tokens": "5"}, "max_tokens is '5'"),
        ([1], {"max_tokens": True}, "max_tokens is True"),
        ([1], {"max_model_len": 0}, "max_model_len is 0; accepted is a whole number from 1 on"),
        ([1], {"max_model_len": "8"}, "max_model_len is '8'"),
        ([1], {"prefill_chunk_size": 0}, "prefill_chunk_size is 0"),
        ([1], {"stop": [""]}, "stop string"),
        ([1], {"stop": [3]}, "stop string"),
        ([1], {"stop": 3}, "stop is 3; accepted is a string or a list of strings"),
        ([1], {"sampling": [SamplingOptions()] * 2}, "2 sampling options for 1 prompts"),
        ([1], {"sampling": {"temperature": 1}}, "accepted are SamplingOptions"),
        ([1], {"sampling": 0.5}, "accepted are SamplingOptions"),
    ],
)
def test_bad_requests_are_refused_before_any_work(model, tokenizer, prompt, options, message):
    before = compile_seconds()
    with pytest.raises(RequestError, match=message):
        qwen_jax.stream_generate(model, tokenizer, prompt, **options)
    with pytest.raises(RequestError, match=message):
        qwen_jax.generate(model, tokenizer, prompt, **options)
    assert compile_seconds() == before


def test_logits_that_are_not_finite_are_an_error(model, tokenizer, ids):
    graph, state = nnx.split(model)
    broken = nnx.merge(graph, jax.tree.map(lambda leaf: leaf, state))
    weight = broken.embed_tokens.weight
    weight.set_value(weight.get_value().at[ids[0][-1]].set(np.nan))
    with pytest.raises(FloatingPointError, match=r"rows \[0\]: the model gave NaN or infinite"):
        qwen_jax.generate(broken, tokenizer, TEXTS[0], max_tokens=NEW)


def test_nan_checks_of_jax_may_be_on(model, tokenizer, greedy):
    """NaN marks rows that took no token; none is there in a run in which all goes well."""
    with jax.debug_nans(True):
        result = qwen_jax.generate(model, tokenizer, TEXTS[0], max_tokens=NEW)
    assert result.tokens == greedy[0].tokens


def test_nothing_is_compiled_twice(model, tokenizer, greedy):
    qwen_jax.generate(model, tokenizer, TEXTS[0], max_tokens=NEW)
    qwen_jax.generate(model, tokenizer, TEXTS[0], max_tokens=NEW, sampling=HOT)
    qwen_jax.generate(model, tokenizer, TEXTS, max_tokens=NEW, sampling=HOT)
    before = compile_seconds()
    for prompt, options in ((TEXTS[1], HOT), ([1] * 16, None), ("a", None), ([5] * 9, HOT)):
        qwen_jax.generate(model, tokenizer, prompt, max_tokens=NEW, sampling=options)
    qwen_jax.generate(model, tokenizer, TEXTS[::-1], max_tokens=NEW, sampling=HOT)
    assert compile_seconds() == before


def test_prompts_of_any_length_share_few_programs(model, monkeypatch, greedy):
    traces = []
    forward = CausalLM.forward

    def counted(*arguments: Any) -> Any:
        traces.append(1)
        return forward(*arguments)

    qwen_jax.generate(model, None, [1], max_tokens=NEW)
    monkeypatch.setattr(CausalLM, "forward", counted)
    for length in (1, 2, 7, 15, 16, 17, 25, 32, 33, 39, 40):
        result = qwen_jax.generate(model, None, [9] * length, max_tokens=NEW)
        assert result.prompt_tokens == length
    # Prompts of up to 16, 32 and 64 tokens; the first of these is known already.
    assert len(traces) == 2


@pytest.mark.parametrize("prompt", [{"role": "user"}, {5, 3}])
def test_a_prompt_without_order_is_refused(model, tokenizer, prompt):
    with pytest.raises(RequestError, match="apply_chat_template"):
        qwen_jax.generate(model, tokenizer, prompt)


@pytest.mark.parametrize("lengths", [[2], [99, 2], [-5, 2], [2.5, 2]])
def test_impossible_lengths_are_refused(no_type_checks, model, lengths):
    with pytest.raises(RequestError, match="lengths"):
        model(np.ones((2, 3), np.int32), np.array(lengths))
