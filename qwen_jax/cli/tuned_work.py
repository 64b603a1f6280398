"""What is timed to tune kernels: decode steps in the loop, and the prefill of a prompt."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import tuning
from pallas_kernels._compat import deprecation_expected
from pallas_kernels.tuning import Place

from ..cache import Cache, allocate, init_cache
from ..decode import DecodeState, decode_loop, init_state, prefill
from ..decode.options import LOOP_OPTIONS, PREFILL_OPTIONS
from ..model import CausalLM, FlatModel, whole

STEPS = 32
RUNS = 7
THREADS = 8
# So that tokens, and the experts that they go to, change at each step.
STRIDE = 7919
# Rows whose tokens may differ from the heuristics' by rounding alone, where two are as likely.
DIFFERENT = 0.25


@dataclasses.dataclass(frozen=True)
class Timing:
    """Median seconds.

    Attributes:
        seconds: with the configurations.
        heuristic: with the heuristics', in turn with the former.
    """

    seconds: float
    heuristic: float

    @property
    def gain(self) -> float:
        """Share of the time that is saved."""
        return 1 - self.seconds / self.heuristic


@dataclasses.dataclass(frozen=True)
class Work:
    """A program that is compiled anew for each set of configurations.

    Attributes:
        name: for a reader.
        function: of `arguments`; what it returns begins with a token of each row.
        arguments: its arrays.
        steps: of the model in one call.
        options: for its compilation.
    """

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    steps: int
    options: Mapping[str, Any]

    @classmethod
    def decode(cls, model: CausalLM, rows: int, context: int) -> Work:
        """So many steps of the decode loop behind a context, whose keys and values are zero."""
        config = model.config
        cache = init_cache(config, rows, context + STEPS + 1)
        lengths = jnp.full((rows,), context, jnp.int32)
        blocks = allocate(cache.blocks, lengths, cache.block_size)
        blocks = dataclasses.replace(blocks, length=blocks.length + lengths)
        cache = dataclasses.replace(cache, blocks=blocks)

        def rule(logits: jax.Array, state: DecodeState) -> jax.Array:
            ids = jnp.argmax(logits, axis=-1) + STRIDE * (1 + state.count)
            return (ids % config.vocab_size).astype(jnp.int32)

        logits = jax.random.normal(jax.random.key(1), (rows, config.vocab_size))
        state = init_state(logits, max_tokens=STEPS + 1, sample=rule)

        def run(flat: FlatModel, cache: Cache, state: DecodeState) -> Any:
            state, cache = decode_loop(whole(flat), cache, state, sample=rule)
            # Column 0 comes from outside.
            return state.tokens[:, 1], cache

        arguments = FlatModel.of(model), cache, state
        return cls(f"decode, batch {rows}", run, arguments, STEPS, LOOP_OPTIONS)

    @classmethod
    def prefill(cls, model: CausalLM, length: int) -> Work:
        """A prompt of so many tokens, of one row."""
        config = model.config
        ids = np.random.default_rng(0).integers(0, config.vocab_size, (1, length))

        def run(flat: FlatModel, cache: Cache, tokens: jax.Array, lengths: jax.Array) -> Any:
            output, cache = prefill(whole(flat), cache, tokens, lengths)
            return jnp.argmax(output.logits, axis=-1), cache

        tokens, lengths = jnp.asarray(ids, jnp.int32), jnp.full((1,), length, jnp.int32)
        arguments = FlatModel.of(model), init_cache(config, 1, length), tokens, lengths
        return cls(f"prefill, {length} tokens", run, arguments, 1, PREFILL_OPTIONS)

    def trace(self) -> None:
        """Trace it, computing nothing."""
        jax.eval_shape(self.function, *self.arguments)

    def times(self, several: Sequence[Mapping[Place, Any]]) -> list[Timing | None]:
        """Time the work with each set of configurations, in turn with the heuristics'.

        Returns:
            None for a set that does not compile, or whose tokens are others.
        """
        with ThreadPoolExecutor(THREADS) as pool:
            plain, *programs = pool.map(self._compiled, [{}, *several])
        assert plain is not None, "the heuristics' program compiles"
        wanted = self._tokens(plain)
        return [
            None
            if program is None or np.mean(self._tokens(program) != wanted) > DIFFERENT
            else self._timed(program, plain)
            for program in programs
        ]

    def _compiled(self, configs: Mapping[Place, Any]) -> Callable[..., Any] | None:
        # A function of its own, or JAX could give the program of another one.
        fresh = jax.jit(lambda *arguments: self.function(*arguments))
        try:
            with tuning.trying(configs), deprecation_expected():
                lowered = fresh.lower(*self.arguments)
            return lowered.compile(compiler_options=dict(self.options))
        except Exception:
            # Such as one that wants more shared memory than there is; the heuristics' must not.
            if not configs:
                raise
            return None

    def _tokens(self, program: Callable[..., Any]) -> np.ndarray:
        return np.asarray(program(*self.arguments)[0])

    def _timed(self, program: Callable[..., Any], plain: Callable[..., Any]) -> Timing:
        pairs = [(self._seconds(program), self._seconds(plain)) for _ in range(RUNS)]
        return Timing(*(statistics.median(times) for times in zip(*pairs, strict=True)))

    def _seconds(self, program: Callable[..., Any]) -> float:
        begin = time.perf_counter()
        jax.block_until_ready(program(*self.arguments))
        return (time.perf_counter() - begin) / self.steps
