"""The bundled model gives the numbers that transformers computed with it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.parity import (
    Expected,
    Figure,
    greedy_figures,
    loss_figure,
    prompt_figures,
    read_expected,
)
from qwen_jax import CausalLM
from qwen_jax.model import ModelOutput
from qwen_jax.text import Tokenizer

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture(scope="module")
def figures(demo_expected: Expected, demo_output: ModelOutput) -> dict[str, Figure]:
    return {figure.array: figure for figure in prompt_figures(demo_expected, demo_output)}


def test_every_stored_array_is_reproduced(demo_expected, figures):
    assert {*figures} == {*demo_expected.arrays, "aux_loss_n515"}
    assert [figure for figure in figures.values() if not figure.passed] == []


def test_differences_are_ten_times_smaller_than_the_bar(figures):
    relative = [figure.value for figure in figures.values() if figure.measure.endswith("std")]
    assert len(relative) == 4 * 8
    assert max(relative) <= 1e-4


def test_greedy_tokens_are_reproduced(demo, demo_expected):
    figures = list(greedy_figures(demo[0], demo_expected))
    assert [figure.array for figure in figures] == [
        "greedy.short",
        "greedy.code",
        "greedy.n65",
        "greedy.n200",
    ]
    # No margin in these texts is so small that a rounding error may change a token.
    assert min(demo_expected.values["greedy_min_margin"].values()) > 1e-2
    assert [figure.value for figure in figures] == [0] * 4


def test_loss_on_held_out_text(demo, demo_expected, demo_output):
    tokens = np.load(GOLDEN / "demo.eval_tokens.npy")
    rows, width = demo_output.logits.shape[:2]
    figure = loss_figure(demo[0], demo_expected, tokens, width=width, rows=rows)
    assert figure.passed, figure


def altered(expected: Expected, name: str, change: float) -> Expected:
    """The expected arrays with the last entry of one of them changed."""
    array = expected.arrays[name].copy()
    array.flat[-1] += change
    return Expected(expected.values, expected.arrays | {name: array})


@pytest.mark.parametrize("change", [0.02, np.nan])
@pytest.mark.parametrize("name", ["logits_last8", "logsumexp", "next_token_logprob", "hidden_last"])
def test_a_change_of_one_number_is_noticed(demo_expected, demo_output, name, change):
    wrong = altered(demo_expected, f"n63.{name}", change)
    missed = [f.array for f in prompt_figures(wrong, demo_output) if not f.passed]
    assert f"n63.{name}" in missed
    assert all(array.startswith("n63.") for array in missed)


@pytest.mark.parametrize("name", ["n63.argmax", "n515.expert_counts"])
def test_a_change_of_one_count_is_noticed(demo_expected, demo_output, name):
    wrong = altered(demo_expected, name, 1)
    missed = [f.array for f in prompt_figures(wrong, demo_output) if not f.passed]
    assert missed == [name]


def test_the_files_of_the_demo_are_those_of_the_numbers(demo: tuple[CausalLM, Tokenizer]):
    expected = read_expected(GOLDEN / "demo.expected")
    model, tokenizer = demo
    assert expected.values["model"] == "Qwen3_5MoeForCausalLM"
    assert tokenizer.vocab_size == model.config.vocab_size == 4096
