"""What tests and benchmarks of kernels share."""

from __future__ import annotations

from contextlib import AbstractContextManager

import jax.numpy as jnp
import numpy as np

from ._compat import INTERPRETER, Target, targeting


def interpreted(cores: int = 4) -> AbstractContextManager[None]:
    """Kernels of calls traced inside are interpreted, on whatever JAX runs on.

    Args:
        cores: how many multiprocessors the kernels are told there are. Each program costs time.
    """
    return targeting(Target(INTERPRETER, INTERPRETER, cores))


def relative_error(value: object, expected: np.ndarray) -> float:
    """Greatest difference, as a share of the root mean square of what is expected."""
    difference = np.abs(np.asarray(value).astype(np.float64) - expected)
    return float(difference.max() / np.sqrt(np.mean(np.square(expected))))


def norm_error(value: object, expected: np.ndarray) -> float:
    """Norm of the difference, as a share of the norm of what is expected."""
    difference = np.asarray(value).astype(np.float64) - expected
    return float(np.linalg.norm(difference) / np.linalg.norm(expected))


def decode_bar(expected: np.ndarray, dtype: str) -> float:
    """Greatest acceptable `relative_error` of a decoding operation.

    In bfloat16, the rounding of the result alone may exceed 1e-2 where a value is four times the
    root mean square. It comes on top.
    """
    own = {"bfloat16": 1e-2, "float32": 1e-5}[dtype]
    return own + relative_error(expected.astype(jnp.dtype(dtype)), expected)


def token_error(value: object, expected: np.ndarray) -> float:
    """Greatest difference, as a share of the root mean square of what is expected for its token.

    The first tokens of a sequence average over little, so their attended values are far larger than
    those of the others. Where zero is expected, nothing else is accepted.

    Args:
        value: one [N, H] a token.
        expected: likewise, in float64.
    """
    difference = np.abs(np.asarray(value).astype(np.float64) - expected).max(axis=(-2, -1))
    size = np.sqrt(np.mean(np.square(expected), axis=(-2, -1)))
    return float(np.max(difference / np.maximum(size, 1e-30)))


def prefill_bar(expected: np.ndarray, dtype: str) -> float:
    """Greatest acceptable `token_error`; the rounding of the result comes on top."""
    own = {"bfloat16": 1e-2, "float32": 1e-4}[dtype]
    return own + token_error(expected.astype(jnp.dtype(dtype)), expected)
