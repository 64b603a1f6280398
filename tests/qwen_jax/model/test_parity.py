"""Every model type against numbers that transformers made with the same weights."""

from __future__ import annotations

import dataclasses
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qwen_jax
from benchmarks.parity import balance_loss, run_prompts
from qwen_jax import CausalLM, QwenConfig, init_cache
from qwen_jax.decode.prompt import run_prefill
from qwen_jax.model import ModelOutput
from qwen_jax.model.rope import inverse_frequencies
from tests.golden.weights import FOLDER, case_names, load_case, write_checkpoint

BAR = 1e-4  # of the standard deviation of what is compared
ROPES: dict[str, dict[str, Any]] = json.loads((FOLDER / "rope.json").read_text())["cases"]

# The default run takes few cases with a cache: sliding windows with and without experts, and the
# hybrids of both kinds of projection. The slow tests take all. Greedy tokens of every case are
# checked from one pass too.
CACHED = {"qwen3_linear", "qwen3_moe_tied", "qwen3_next_yarn", "qwen3_5_moe"}
GENERATED = {"qwen2_sliding", "qwen3_next_yarn"}


def slow_but_for(chosen: set[str]) -> list[Any]:
    """All cases, those not chosen marked slow."""
    assert chosen <= {*case_names()}
    slow = pytest.mark.slow
    return [name if name in chosen else pytest.param(name, marks=slow) for name in case_names()]


@dataclasses.dataclass(frozen=True)
class Run:
    """A case, its model, and the output for all its texts as one ragged batch without a cache.

    Rows: the long prompt; greedy prompt and tokens; the three prompts of the padded batch.
    """

    case: dict[str, Any]
    arrays: dict[str, np.ndarray]
    model: CausalLM
    texts: list[np.ndarray]
    output: ModelOutput

    @property
    def std(self) -> float:
        return float(self.arrays["logits"].std())

    def logits(self, row: int) -> np.ndarray:
        return np.asarray(self.output.logits[row, : len(self.texts[row])])


@pytest.fixture(scope="module", params=case_names())
def run(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
) -> Run:
    case, arrays = load_case(request.param)
    folder = write_checkpoint(tmp_path_factory.mktemp(request.param), case)
    model = load(folder)
    texts = [
        arrays["tokens"],
        np.concatenate([arrays["greedy_prompt"], arrays["greedy_tokens"][:-1]]),
        *(
            row[keep > 0]
            for row, keep in zip(arrays["batch_tokens"], arrays["batch_mask"], strict=True)
        ),
    ]
    return Run(case, arrays, model, texts, run_prompts(model, [t.tolist() for t in texts]))


def load(folder: Path) -> CausalLM:
    """A folder in float32. What is warned of is tested with the configurations."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        model, tokenizer = qwen_jax.load(folder, dtype="float32")
    assert tokenizer is None
    return model


def difference(found: np.ndarray, expected: np.ndarray, std: float | np.ndarray) -> float:
    """Largest difference over `std`; NaN counts as infinite."""
    assert found.shape == expected.shape
    return float(np.nan_to_num(np.abs(found - expected) / std, nan=np.inf).max())


def logsumexp(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    return np.log(np.exp(wide).sum(-1))


def test_logits(run):
    logits = run.logits(0)
    assert difference(logits[run.arrays["positions"]], run.arrays["logits"], run.std) <= BAR
    assert difference(logsumexp(logits), run.arrays["logsumexp"], run.std) <= BAR
    clear = run.arrays["top2_margin"] > 1e-2
    assert clear.mean() > 0.9
    np.testing.assert_array_equal(logits.argmax(-1)[clear], run.arrays["argmax"][clear])


def test_hidden_states(run):
    expected = run.arrays["hidden"]
    # The output of the last layer before the final norm is not among a model's hidden states.
    expected = np.delete(expected, -2, axis=0)
    found = np.stack([np.asarray(state[0, -1]) for state in run.output.hidden_states])
    assert difference(found, expected, expected.std(axis=-1, keepdims=True)) <= BAR


def test_routing(run):
    assert [*run.output.routing] == run.case["moe_layers"]
    if not run.case["moe_layers"]:
        return
    routing = run.output.routing.values()
    ids = np.stack([np.asarray(choice.ids[0]) for choice in routing])
    weights = np.stack([np.asarray(choice.weights[0]) for choice in routing])
    assert run.case["statistics"]["router_logit_gap_min"] > 1e-3
    np.testing.assert_array_equal(ids, run.arrays["router_ids"])
    assert difference(weights, run.arrays["router_weights"], 1.0) <= BAR


def test_balance_loss(run):
    if not run.case["moe_layers"]:
        return
    lengths = np.array([*map(len, run.texts)])
    rows = np.arange(len(lengths))[:, None]
    real = np.arange(lengths.max()) < lengths[:, None]
    for name, chosen in (("aux_loss", rows == 0), ("batch_aux_loss", rows >= 2)):
        loss = balance_loss(run.output.routing, real & chosen)
        assert loss == pytest.approx(run.arrays[name], abs=1e-5)


def test_greedy_tokens_by_one_pass(run):
    logits = run.logits(1)[len(run.arrays["greedy_prompt"]) - 1 :]
    assert difference(logits, run.arrays["greedy_logits"], run.std) <= BAR
    assert run.arrays["greedy_margin"].min() > 1e-2
    np.testing.assert_array_equal(logits.argmax(-1), run.arrays["greedy_tokens"])


def test_ragged_batch_padded_on_the_right(run):
    found = np.stack([run.logits(row)[-1] for row in (2, 3, 4)])
    assert difference(found, run.arrays["batch_logits"], run.std) <= BAR


@pytest.mark.parametrize("name", slow_but_for(CACHED))
def test_ragged_batch_padded_on_the_left_into_a_cache(name, tmp_path):
    """The fourth row is the greedy prompt."""
    case, arrays = load_case(name)
    model = load(write_checkpoint(tmp_path, case))
    prompt, mask = arrays["greedy_prompt"], arrays["batch_mask"]
    tokens = np.full((4, mask.shape[1]), 1, np.int32)
    tokens[:3] = arrays["batch_tokens"]
    tokens[3, -len(prompt) :] = prompt
    lengths = np.array([*mask.sum(1), len(prompt)], np.int32)
    cache = init_cache(model.config, 4, 64, block_size=16)
    output, cache = run_prefill(model, cache, tokens, lengths, padding="left")
    expected = np.concatenate([arrays["batch_logits"], arrays["greedy_logits"][:1]])
    assert difference(np.asarray(output.logits), expected, arrays["logits"].std()) <= BAR
    np.testing.assert_array_equal(cache.length, lengths)


@pytest.mark.parametrize("name", slow_but_for(GENERATED))
def test_generated_tokens(name, tmp_path):
    case, arrays = load_case(name)
    model = load(write_checkpoint(tmp_path, case, shards=3))
    wanted = arrays["greedy_tokens"]
    result = qwen_jax.generate(
        model, None, arrays["greedy_prompt"], max_tokens=len(wanted), ignore_eos=True
    )
    assert result.tokens == wanted.tolist()
    logprobs = arrays["greedy_logits"].max(-1) - logsumexp(arrays["greedy_logits"])
    assert difference(np.array(result.logprobs), logprobs, arrays["logits"].std()) <= BAR


@pytest.mark.parametrize("name", ROPES)
def test_inverse_frequencies(name):
    expected = ROPES[name]
    sizes = {"vocab_size": 8, "hidden_size": 64, "num_hidden_layers": 1, "intermediate_size": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True}
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
    if expected["config"]["model_type"] == "qwen3":
        experts = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        config = QwenConfig.from_hf(sizes | heads | experts | expected["config"])
    assert config.rotary_dim == expected["rotary_dim"]
    found, factor = inverse_frequencies(config.rope_parameters, config.rotary_dim)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected["inv_freq"], rtol=1e-6)
    assert factor == pytest.approx(expected["attention_factor"], rel=1e-7)
