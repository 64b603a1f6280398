"""What a model is given: ids of tokens and lengths of rows, checked before anything is compiled."""

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array

from ..errors import RequestError


def check_tokens(tokens: Array | np.ndarray, vocab_size: int) -> Array:
    """Token ids as an int32 array; values are checked unless they are traced."""
    if isinstance(tokens, Tracer):
        return tokens
    array = np.asarray(tokens)
    if array.ndim != 2 or array.size == 0 or array.dtype.kind not in "iu":
        raise RequestError(
            f"tokens: got an array of shape {array.shape} and dtype {array.dtype}; accepted are "
            f"integer ids [B, T] "
            "with at least one token; wrap a single prompt in a list"
        )
    low, high = int(array.min()), int(array.max())
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise RequestError(
            f"tokens: id {wrong} is outside the vocabulary; accepted are 0 to {vocab_size - 1}"
        )
    return jnp.asarray(array, jnp.int32)


def check_lengths(lengths: Array | np.ndarray | None, shape: tuple[int, ...]) -> Array:
    """Lengths of rows of tokens [B, T] as an int32 array; values are checked unless traced."""
    rows, width = shape
    if lengths is None:
        return jnp.full((rows,), width, jnp.int32)
    if isinstance(lengths, Tracer):
        return lengths
    array = np.asarray(lengths)
    if array.shape != (rows,) or array.dtype.kind not in "iu":
        raise RequestError(
            f"lengths: got an array of shape {array.shape} and dtype {array.dtype}; accepted are "
            f"{rows} integers, one a row"
        )
    wrong = array[(array < 0) | (array > width)]
    if wrong.size:
        raise RequestError(f"lengths: {int(wrong[0])} is outside 0 to {width}, the tokens of a row")
    return jnp.asarray(array, jnp.int32)
