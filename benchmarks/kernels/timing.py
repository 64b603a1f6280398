"""Time of a kernel on the device."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

CALLS_A_STEP = 64
SECONDS_A_RUN = 0.03
RUNS = 5
# Launches of a graph that do not need each other could run at the same time.
IN_ORDER = {"xla_gpu_command_buffer_scheduling_mode": "SERIALIZE"}


def seconds_per_call(
    function: Callable[[Any, Any, Any], Any],
    carry: Any,
    inputs: Sequence[Any],
    shared: Any,
    calls: int = CALLS_A_STEP,
) -> float:
    """Median time of one call, many of them chained in one program; see `Chain`."""
    return Chain.compiled(function, carry, inputs, shared, calls).seconds()


@dataclasses.dataclass(frozen=True)
class Chain:
    """Calls that wait for each other, compiled as one program; compiling may be done in threads.

    A loop on the device runs all calls of its body as one graph, so the host's share is small and
    launches cost what they cost inside a decode loop.

    Attributes:
        run: the program: so many rounds of its calls.
        calls: of a round.
    """

    run: Callable[[int], None]
    calls: int

    @classmethod
    def compiled(
        cls,
        function: Callable[[Any, Any, Any], Any],
        carry: Any,
        inputs: Sequence[Any],
        shared: Any,
        calls: int = CALLS_A_STEP,
    ) -> Chain:
        """Compile; nothing is run.

        Args:
            function: (carry, input, shared) -> carry. What a call returns goes into the next.
            carry: start of the chain.
            inputs: one a call, taken in turn. Give so many that together they read more than the
                device's L2 cache holds.
            shared: arrays that every call takes.
            calls: at least this many calls are unrolled in the loop's body; few where they are slow
                to compile and long to run.
        """
        step = jax.jit(function)
        count = len(inputs) * -(-calls // len(inputs))

        @jax.jit
        def chain(carry: Any, inputs: Sequence[Any], shared: Any, repeats: jax.Array) -> Any:
            def body(_: jax.Array, carry: Any) -> Any:
                for index in range(count):
                    carry = step(carry, inputs[index % len(inputs)], shared)
                return carry

            return jax.lax.fori_loop(0, repeats, body, carry)

        program = chain.lower(carry, inputs, shared, jnp.int32(1)).compile()

        def run(repeats: int) -> None:
            jax.block_until_ready(program(carry, inputs, shared, jnp.int32(repeats)))

        return cls(run, count)

    @classmethod
    def of_equals(
        cls,
        function: Callable[[jax.Array, Any], Any],
        x: jax.Array,
        inputs: Sequence[Any],
        calls: int = CALLS_A_STEP,
    ) -> Chain:
        """Compile calls that take the same x, with no launch between them; nothing is run.

        All results leave the round, so that no call is left out, and barriers keep calls from being
        merged. After each turn of the inputs x is new, at the cost of one small launch.

        Args:
            function: (x, input) -> result.
            x: what all calls take.
            inputs: see `compiled`.
            calls: see `compiled`.
        """
        step = jax.jit(function)
        turns = -(-calls // len(inputs))

        @jax.jit
        def chain(x: jax.Array, inputs: Sequence[Any], repeats: jax.Array) -> Any:
            def body(_: jax.Array, carry: Any) -> Any:
                x, results = carry[0], []
                for _ in range(turns):
                    for one in inputs:
                        x, y = jax.lax.optimization_barrier((x, step(x, one)))
                        results.append(y)
                    last = jax.tree.leaves(results[-1])[0]
                    x = x + 0 * last.ravel()[0].astype(x.dtype)
                return x, results

            results = [
                jax.tree.map(lambda y: jnp.zeros(y.shape, y.dtype), y) for y in shapes * turns
            ]
            return jax.lax.fori_loop(0, repeats, body, (x, results))

        shapes = [jax.eval_shape(step, x, one) for one in inputs]
        program = chain.lower(x, inputs, jnp.int32(1)).compile(compiler_options=IN_ORDER)

        def run(repeats: int) -> None:
            jax.block_until_ready(program(x, inputs, jnp.int32(repeats)))

        return cls(run, len(inputs) * turns)

    def seconds(self) -> float:
        """Median time of one call."""
        self.run(1)
        repeats = max(1, round(SECONDS_A_RUN / self._time(1)))
        median = statistics.median(self._time(repeats) for _ in range(RUNS))
        return median / (repeats * self.calls)

    def _time(self, repeats: int) -> float:
        start = time.perf_counter()
        self.run(repeats)
        return time.perf_counter() - start
