"""Memory filled on purpose, so that each of several measurements in a process has its own peak."""

from __future__ import annotations

import gc
import sys

import jax
import jax.numpy as jnp

from qwen_jax.memory import accelerator_memory, available_memory, peak_memory

# For what a case takes beside weights and cache: 22 GB of 64 prompts of 512 tokens.
KEPT_FREE = 24 << 30
PIECE = 1 << 30


class Ballast:
    """Fills memory up to the highest peak so far, so that the next one is seen above it.

    JAX tells the highest peak of a process alone, and cannot forget it.
    """

    def __init__(self) -> None:
        self._arrays: list[jax.Array] = []
        self._hidden = 0

    def fill(self, beside: int) -> None:
        """Fill memory before a measurement; what was filled before is let go.

        Where there is less room than the measurement may need, a peak below the highest so far
        stays unknown; on a host every peak does, since what ran before stays in the process.

        Args:
            beside: bytes of weights and cache that are to come, or more.
        """
        self._arrays, self._hidden = [], peak_memory()
        gc.collect()
        memory = accelerator_memory()
        if memory is None:
            self._hidden = sys.maxsize
            return
        missing = max(self._hidden - (memory - available_memory()), 0)
        if missing <= available_memory() - beside - KEPT_FREE:
            # In pieces, since no free stretch may be that long.
            pieces = [PIECE] * (missing // PIECE) + [missing % PIECE]
            self._arrays = [jnp.zeros((nbytes,), jnp.uint8) for nbytes in pieces]
            jax.block_until_ready(self._arrays)
            self._hidden = 0

    def own(self, peak: int) -> int | None:
        """A peak since `fill` without what it filled; None where it may be of a time before."""
        filled = sum(array.nbytes for array in self._arrays)
        return peak - filled if peak > self._hidden else None
