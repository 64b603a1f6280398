"""Errors name flags in place of parameters."""

from __future__ import annotations

import pytest

from qwen_jax.cli.flags import about, flags_of
from qwen_jax.errors import RequestError


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("rate is 0; lower the rate", "--learning-rate is 0; lower the rate"),
        ("a prompt and max_tokens 4; raise max_len", "a prompt and --max-tokens 4; raise max_len"),
        ("stop strings of max_tokens_all", "--stop strings of max_tokens_all"),
        ("rates are bad", "rates are bad"),
    ],
)
def test_parameters_become_flags(message, told):
    with (
        pytest.raises(RequestError) as caught,
        flags_of("max_tokens", "stop", rate="learning_rate"),
    ):
        raise RequestError(message)
    assert str(caught.value) == told


def test_flags_stand_in_front():
    with pytest.raises(RequestError, match=r"^--a, --b: both$"), about("--a", "--b"):
        raise RequestError("both")
