"""How much programs are optimised when tests compile them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax


@contextlib.contextmanager
def optimised(wanted: bool = True) -> Iterator[None]:
    """Programs compiled inside are optimised, as users' are, or not."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", not wanted)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)
