"""The memory bandwidth that a program of JAX sees: that of a plain copy."""

from __future__ import annotations

import statistics
import time

import jax
import jax.numpy as jnp

from ..memory import available_memory

COPY_BYTES = 1 << 30
# Quick, and no more than a hint: a host's caches hold much of it.
HOST_COPY_BYTES = 1 << 24
COPIES, RUNS = 8, 5


def copy_size() -> int:
    """Bytes to copy on the default device: 1 GiB, less where it is full or is the host."""
    if jax.default_backend() == "cpu":
        return HOST_COPY_BYTES
    return min(COPY_BYTES, available_memory() // 4)


def copy_bytes_per_second(nbytes: int) -> float:
    """Bytes read and written a second by a copy of so many bytes, made by the device."""
    source = jnp.zeros((nbytes // 4,), jnp.int32)
    copy = jax.jit(lambda x: x + jnp.int32(1))
    result = copy(source).block_until_ready()

    def run() -> float:
        nonlocal result
        start = time.perf_counter()
        for _ in range(COPIES):
            result = copy(source)
        result.block_until_ready()
        return (time.perf_counter() - start) / COPIES

    return 2 * nbytes / statistics.median(run() for _ in range(RUNS))
