"""How programs are compiled in the tests' own process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import jax
import pytest

# XLA's older emitters need less than half the time for a program that runs a few times; and a
# module for each part of a program costs more than it saves where every core is busy. A version of
# XLA that does not know an extra option ignores it.
QUICK = (
    "--xla_cpu_parallel_codegen_split_count=1 "
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
)
# `compiler_options` of one program that runs often: older emitters give slower code.
USUAL = {"xla_backend_extra_options": ""}


def emit_quickly() -> None:
    """Programs of this process are compiled by the quick ways from now on.

    To be called before JAX has looked for devices: XLA reads its flags once. Processes started
    later do not see them, and compile as users do.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_FLAGS", f"{os.environ.get('XLA_FLAGS', '')} {QUICK}")
        jax.devices()


def environment() -> dict[str, str]:
    """Of a program that calls `emit_quickly` first, and so finds what this process compiled."""
    return os.environ | {
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir),
    }


@contextlib.contextmanager
def optimised(wanted: bool = True) -> Iterator[None]:
    """Programs compiled inside are optimised, as users' are, or not."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", not wanted)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)
