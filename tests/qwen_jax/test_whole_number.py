"""What counts as a whole number: Python's and numpy's, but not True, fractions or text."""

import numpy as np
import pytest

from qwen_jax.cache import init_cache
from qwen_jax.config import QwenConfig
from qwen_jax.errors import RequestError
from qwen_jax.evaluate import Windows
from qwen_jax.evaluate.texts import Document
from qwen_jax.research import routers
from qwen_jax.train import Data
from qwen_jax.train.lora import Lora
from qwen_jax.whole_number import check_whole, is_whole

TOKENS = np.arange(64, dtype=np.int32)
TAKERS = {
    "cache": lambda n: init_cache(QwenConfig.preset("qwen3-30b-a3b"), n, 8),
    "windows": lambda n: Windows((Document("text", TOKENS),), window=n),
    "data": lambda n: Data(TOKENS, rows=n, window=8),
    "lora": lambda n: Lora(rank=n),
    "hash": lambda n: routers.HashRouter(8, n),
}


@pytest.mark.parametrize("value", [0, 7, np.int32(7), np.uint8(7)])
def test_whole_numbers(value):
    found = check_whole("size", value, 0)
    assert is_whole(value) and found == value and type(found) is int


@pytest.mark.parametrize("value", [2.0, True, np.True_, "2", None, np.float32(2), [2]])
def test_what_is_none(value):
    assert not is_whole(value)
    with pytest.raises(RequestError, match=r"size is .*accepted is a whole number from 1 on"):
        check_whole("size", value, 1)


def test_one_that_is_too_small():
    assert check_whole("size", 2, 2) == 2
    with pytest.raises(RequestError, match="size is 1; accepted is a whole number from 2 on"):
        check_whole("size", 1, 2)


@pytest.mark.parametrize("taker", TAKERS.values(), ids=TAKERS)
def test_callers_are_told(taker):
    # True passes for an int with the type checker that tests run under; a fraction does not.
    with pytest.raises(RequestError, match="is True; accepted is a whole number from"):
        taker(True)
