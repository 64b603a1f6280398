"""Options of sampling: what is accepted, and what a model's generation_config.json asks for."""

from __future__ import annotations

import dataclasses
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qwen_jax.decode import SamplingOptions, SamplingParams
from qwen_jax.errors import CheckpointError, RequestError

FIELDS = {field.name for field in dataclasses.fields(SamplingOptions)}
NOT_NUMBERS = [None, "1", [1.0], True, float("nan"), float("inf"), -float("inf")]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((name, value) for name in sorted(FIELDS - {"top_k", "seed"}) for value in NOT_NUMBERS),
        *(("temperature", value) for value in (-1, -1e-9)),
        *((name, value) for name in ("top_p", "min_p") for value in (-0.1, 1.0000001, 5)),
        *(("repetition_penalty", value) for value in (0, -0.5, -1.0)),
        *(("top_k", value) for value in (None, "5", 1.5, 5.0, -2, True, float("nan"))),
        *(("seed", value) for value in ("7", 1.0, -1, 2**32, 2**63, True)),
    ],
)
def test_bad_options_are_refused_by_name_with_the_value_and_what_is_accepted(
    no_type_checks, field, value
):
    with pytest.raises(RequestError) as caught:
        SamplingOptions(**{field: value})
    message = str(caught.value)
    assert message.startswith(f"{field} is {value!r}; accepted is ")


def test_numpy_numbers_are_options_too(no_type_checks):
    options = SamplingOptions(temperature=np.float32(0.5), top_p=np.float64(0.5), min_p=np.int64(0))
    assert SamplingParams.stack([options]).temperature.tolist() == [0.5]


def write(folder: Path, content: Any) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("content", "options"),
    [
        ({}, SamplingOptions()),
        ({"do_sample": False, "temperature": 0.6}, SamplingOptions()),
        ({"do_sample": True}, SamplingOptions(temperature=1.0)),
        (
            {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": 1},
            SamplingOptions(temperature=0.6, top_k=20, top_p=0.95),
        ),
        (
            {"do_sample": True, "top_k": None, "min_p": 0.1, "repetition_penalty": 1.05},
            SamplingOptions(temperature=1.0, min_p=0.1, repetition_penalty=1.05),
        ),
    ],
)
def test_options_of_a_generation_config(tmp_path, content, options):
    assert SamplingOptions.from_generation_config(write(tmp_path, content)) == options


def test_a_folder_without_generation_config_is_greedy(tmp_path):
    assert SamplingOptions.from_generation_config(tmp_path) == SamplingOptions()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"do_sample": true, "top_p": 3}', "top_p is 3"),
        ('{"do_sample": true, "top_k": "20"}', "top_k is '20'"),
        ("[1]", "holds a list"),
        ("{", "not readable as JSON"),
    ],
)
def test_a_bad_generation_config_is_refused_with_its_path(no_type_checks, tmp_path, text, message):
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(CheckpointError, match=message) as caught:
        SamplingOptions.from_generation_config(tmp_path)
    assert str(tmp_path / "generation_config.json") in str(caught.value)


def test_penalties_of_a_greedy_generation_config_count(tmp_path):
    text = '{"do_sample": false, "repetition_penalty": 1.3, "temperature": 0.7}'
    (tmp_path / "generation_config.json").write_text(text)
    assert SamplingOptions.from_generation_config(tmp_path) == SamplingOptions(
        repetition_penalty=1.3
    )


# Each rule of transformers' GenerationConfig that changes tokens, with what asks for it and what
# leaves it off.
RULES = {
    "bad_words_ids": ([[5]], None),
    "begin_suppress_tokens": ([5], []),
    "dola_layers": ("high", None),
    "encoder_no_repeat_ngram_size": (2, 0),
    "encoder_repetition_penalty": (1.2, 1.0),
    "epsilon_cutoff": (3e-4, 0.0),
    "eta_cutoff": (3e-4, 0.0),
    "exponential_decay_length_penalty": ([5, 1.1], None),
    "force_words_ids": ([[5]], None),
    "forced_bos_token_id": (5, None),
    "forced_decoder_ids": ([[1, 5]], None),
    "forced_eos_token_id": (5, None),
    "guidance_scale": (1.5, 1),
    "max_time": (2.5, None),
    "min_length": (4, 0),
    "min_new_tokens": (4, None),
    "no_repeat_ngram_size": (3, 0),
    "num_beams": (4, 1),
    "penalty_alpha": (0.6, None),
    "sequence_bias": ([[[5], 2.0]], None),
    "stop_strings": (["END"], []),
    "suppress_tokens": ([5], None),
    "token_healing": (True, False),
    "top_h": (0.4, None),
    "typical_p": (0.9, 1.0),
    "watermarking_config": ({"bias": 2.0}, None),
}


def test_rules_of_a_generation_config_that_are_not_implemented_are_named(tmp_path):
    for name, (asked, _) in RULES.items():
        with pytest.warns(UserWarning, match=rf"generation_config.json: {name} not implemented"):
            SamplingOptions.from_generation_config(write(tmp_path, {name: asked}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        off = {name: value for name, (_, value) in RULES.items()}
        assert SamplingOptions.from_generation_config(write(tmp_path, off)) == SamplingOptions()
