"""The adapter for lm-eval: its arithmetic against plain model calls, and a task of its own."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from qwen_jax import GenerationResult, SamplingOptions
from qwen_jax.errors import RequestError
from qwen_jax.evaluate import harness
from qwen_jax.evaluate.continuations import Continuation, likelihoods, rolling
from qwen_jax.evaluate.harness import HarnessAdapter, as_lm

TEXTS = ("And Moses said unto the", "In the beginning", "The function returns a list of strings.")


@dataclass
class Request:
    """What is read of lm-eval's `Instance`."""

    args: tuple[Any, ...]


@pytest.fixture(scope="module")
def adapter(reader) -> HarnessAdapter:
    return HarnessAdapter(*reader, name="models/reader", batch_size=2, max_model_len=24)


def expected_likelihood(model, log_softmax, context, continuation) -> tuple[float, bool]:
    """One sequence through the model; what stands behind it changes nothing."""
    ids = [*context, *continuation]
    row = np.array([(*ids, *[0] * (40 - len(ids)))], np.int32)
    logs = log_softmax(model(row).logits)[0]
    at = range(len(context), len(ids))
    return sum(logs[i - 1, ids[i]] for i in at), all(logs[i - 1].argmax() == ids[i] for i in at)


def test_continuations_are_scored_as_by_plain_calls(adapter, reader, log_softmax):
    model, tokenizer = reader
    ids = [tokenizer.encode(text) for text in TEXTS]
    pairs = [(row[:split], row[split:]) for row in ids for split in (1, len(row) - 1)]
    # One that the model itself would go on with.
    row = np.array([(*ids[0], *[0] * (40 - len(ids[0])))], np.int32)
    pairs.append((ids[0], [int(np.asarray(model(row).logits)[0, len(ids[0]) - 1].argmax())]))
    requests = [(("", ""), *pair) for pair in pairs]
    found = adapter._loglikelihood_tokens(requests)
    for pair, (value, greedy) in zip(pairs, found, strict=True):
        expected = expected_likelihood(model, log_softmax, *pair)
        assert value == pytest.approx(expected[0], abs=1e-4)
        assert greedy == expected[1]
    assert found[-1][1]


def test_long_contexts_lose_their_first_tokens(adapter, reader, log_softmax):
    model, tokenizer = reader
    ids = (tokenizer.encode(TEXTS[2]) * 6)[:40]
    ((value, _),) = adapter._loglikelihood_tokens([(("", ""), ids[:37], ids[37:])])
    # 24 tokens are read, and the last one is only predicted.
    expected = expected_likelihood(model, log_softmax, ids[15:37], ids[37:])
    assert value == pytest.approx(expected[0], abs=1e-4)


@pytest.mark.parametrize("tokens", [1, 23, 24, 25, 48, 61])
def test_rolling_pieces_score_each_token_once(tokens):
    text = list(range(100, 100 + tokens))
    pieces = list(rolling(text, 7, 24))
    assert [token for piece in pieces for token in piece.continuation] == text
    assert pieces[0].context == [7]
    for piece in pieces[1:]:
        joined = [*piece.context, *piece.continuation]
        start = joined[0] - 100
        assert joined == text[start : start + 25]


def test_rolling_pieces_are_those_of_lm_eval():
    utils = pytest.importorskip("lm_eval.utils")
    text = list(range(100, 161))
    theirs = utils.get_rolling_token_windows(text, 7, 24, 1)
    theirs = [utils.make_disjoint_window(pair) for pair in theirs]
    ours = rolling(text, 7, 24)
    assert [(list(a), list(b)) for a, b in theirs] == [(p.context, p.continuation) for p in ours]


def test_rolling_likelihood_is_the_sum(adapter, reader, log_softmax):
    model, tokenizer = reader
    text = TEXTS[2] * 4
    ids = tokenizer.encode(text)
    assert len(ids) > 24
    expected = sum(
        expected_likelihood(model, log_softmax, piece.context, piece.continuation)[0]
        for piece in rolling(ids, adapter.eot_token_id, 24)
    )
    found = adapter.loglikelihood_rolling([Request((TEXTS[0],)), Request((text,)), Request(("",))])
    assert found[1] == pytest.approx(expected, abs=1e-3)
    assert found[2] == 0


def _answer(text: str) -> GenerationResult:
    return GenerationResult(text, [], [], "stop", 0, 0, 0.0, 0.0)


def test_generations_go_through_generate(reader, monkeypatch):
    """The longest prompts first, as many tokens of each as there is room for."""
    calls = []

    def recorded(model, tokenizer, prompts, **options):
        calls.append((prompts, options))
        return [_answer(f"answer to {ids[-1]}") for ids in prompts]

    monkeypatch.setattr(harness, "generate", recorded)
    model, tokenizer = reader
    ids = [tokenizer.encode(text) for text in TEXTS]
    room = max(map(len, ids)) - 1
    adapter = HarnessAdapter(model, tokenizer, name="a", batch_size=2, max_model_len=room + 6)
    given = {"until": ["\n", ""], "max_gen_toks": 6, "do_sample": False, "temperature": 0.7}
    found = adapter.generate_until([Request((text, given)) for text in TEXTS])
    assert found == [f"answer to {row[-1]}" for row in ids]
    longest_first = sorted(ids, key=len, reverse=True)
    asked = [row for prompts, _ in calls for row in prompts]
    assert asked == [row[-room:] for row in longest_first] != longest_first
    options = {"max_tokens": 6, "sampling": SamplingOptions(), "stop": ("\n",)}
    assert [options for _, options in calls] == [options] * 2


def test_arguments_of_generation(adapter, monkeypatch):
    asked = []

    def record(_, numbers, prompts, options):
        asked.append((options.max_tokens, options.until, options.sampling))
        return dict.fromkeys(numbers, "")

    monkeypatch.setattr(HarnessAdapter, "_generate", record)
    for given in (
        {},
        {"until": "\n", "max_new_tokens": 3, "temperature": 0.5},
        {"do_sample": True, "top_k": 5, "seed": 1},
    ):
        adapter.generate_until([Request(("a", given))])
    assert asked == [
        (256, (), SamplingOptions()),
        (3, ("\n",), SamplingOptions(temperature=0.5)),
        (256, (), SamplingOptions(temperature=1.0, top_k=5, seed=1)),
    ]
    with pytest.raises(RequestError, match=r"\['num_beams'\] are not implemented"):
        adapter.generate_until([Request(("a", {"num_beams": 2}))])


def test_chat_template(adapter, reader):
    _, tokenizer = reader
    chat = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "It is"}]
    first = tokenizer.apply_chat_template(chat[:1])
    assert adapter.apply_chat_template(chat[:1]) == first
    opened = adapter.apply_chat_template(chat, add_generation_prompt=False)
    assert opened.endswith("It is")
    assert tokenizer.apply_chat_template(chat, add_generation_prompt=False).startswith(opened)
    assert adapter.tokenizer_name == "models__reader"
    assert adapter.chat_template(True)
    with pytest.raises(RequestError, match="'other' is asked for"):
        adapter.chat_template("other")


def test_refusals(adapter, reader):
    model, tokenizer = reader
    for options, words in (
        ({"batch_size": 0}, "batch_size is 0"),
        ({"max_model_len": 65}, "max_model_len is 65; accepted are 2 to 64"),
    ):
        with pytest.raises(RequestError, match=words):
            HarnessAdapter(model, tokenizer, name="a", **options)
    for pair, words in (
        (([], [1]), "request 0 has 0 tokens of context"),
        (([1], []), "both need at least one"),
        (([1], [2] * 25), "25 tokens to score, more than the 24"),
    ):
        with pytest.raises(RequestError, match=words):
            likelihoods(model, [Continuation(*pair)], batch_size=2, max_model_len=24)
    with pytest.raises(RequestError, match="30 new tokens leave no room"):
        adapter.generate_until([Request(("a", {"max_gen_toks": 30}))])


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is not None, reason="lm-eval is here")
def test_without_lm_eval_the_extra_is_named(reader):
    with pytest.raises(RequestError, match=r"pip install 'qwen-jax\[eval\]'"):
        as_lm(*reader, name="a")


@pytest.mark.filterwarnings("ignore")
def test_a_task_of_local_text(tmp_path, demo):
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]

    rows = [
        {"question": "And Moses said unto the", "choices": ["children", "keyword", "tuple"]},
        {"question": "In the beginning God created the", "choices": ["heaven", "list", "str"]},
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = {
        "task": "local_choice",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": 0,
        "metric_list": [{"metric": "acc"}],
    }
    (tmp_path / "task.yaml").write_text(json.dumps(task))
    lm = as_lm(*demo, name="demo", batch_size=4, max_model_len=64)
    manager = TaskManager(include_path=str(tmp_path))
    results = lm_eval.simple_evaluate(lm, tasks=["local_choice"], task_manager=manager)
    assert results["results"]["local_choice"]["acc,none"] == 1.0
