"""Times of `gated_delta_rule` and of its kernels for its benchmark."""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.kernels.delta_rule_cases import Case, arguments
from benchmarks.kernels.timing import CALLS_A_STEP, RUNS, SECONDS_A_RUN
from pallas_kernels._compat import current_target
from pallas_kernels.delta_rule import chunked, gated_delta_rule
from pallas_kernels.delta_rule.config import DecodeConfig, PassConfig, decode_config, pass_config
from pallas_kernels.delta_rule.decode import decode
from pallas_kernels.delta_rule.specs import Spec

ROTATED_BYTES = 220e6
LONG = 8192  # tokens whose kernels each take longer than the host takes to launch one


def decode_seconds(spec: Spec, config: DecodeConfig | None = None) -> float:
    """Time of a call that updates its states in place; more states than the cache holds in turn.

    All calls share one ring, so that none can start before the one before has ended. An iteration
    of a loop costs the host some 20 us, so it makes many calls.
    """
    *inputs, ring, state, start, lengths = arguments(Case(spec))
    config = config or decode_config(current_target(), spec.batch, state)
    turns = max(1, -(-int(ROTATED_BYTES) // spec.state_bytes))
    calls = turns * -(-CALLS_A_STEP // turns)

    @functools.partial(jax.jit, donate_argnums=0)
    def loop(carry: Any, repeats: jax.Array) -> Any:
        def body(_: jax.Array, carry: Any) -> Any:
            ring, states = carry
            states = list(states)
            for call in range(calls):
                _, ring, states[call % turns] = decode(
                    *inputs, ring, states[call % turns], start, lengths, None, config=config
                )
            return ring, tuple(states)

        return jax.lax.fori_loop(0, repeats, body, carry)

    states = tuple(jnp.copy(state) for _ in range(turns))
    return _loop_seconds(loop, (jnp.copy(ring), states)) / calls


def prefill_seconds(spec: Spec) -> dict[str, float]:
    """Time of a call, and of its kernels where the host does not limit them."""
    whole = jax.jit(functools.partial(gated_delta_rule, implementation="triton"))
    arrays = arguments(Case(spec))
    if spec.batch * spec.length < LONG:
        return {"seconds": _chained_seconds(whole, arrays)}
    times = {"seconds": _launched_seconds(whole, arrays)}
    step, given = _steps(spec)
    for name, taken in given.items():
        times[name] = _launched_seconds(jax.jit(getattr(step, name)), taken)
    return times


def sweep(spec: Spec, cuts: list[tuple[int, ...]], until: float) -> list[dict[str, Any]]:
    """Times of other configurations, of decoding or of the pass over the chunks; fastest first."""
    rows = []
    for cut in cuts:
        if time.monotonic() > until:
            break
        try:
            if spec.length == 1:
                config = DecodeConfig(*cut)
                taken = decode_seconds(spec, config)
            else:
                config = PassConfig(*cut)
                arrays = arguments(Case(spec))
                step = chunked.steps(spec.length, arrays[0].dtype, arrays[7].shape, config)
                run = jax.jit(step.passing)
                taken = _launched_seconds(run, _steps(spec)[1]["passing"])
            rows.append({**dataclasses.asdict(config), "seconds": taken})
        except Exception as error:
            print(f"    {cut}: {str(error)[:200]}", flush=True)
    return sorted(rows, key=lambda row: row["seconds"])


@functools.lru_cache(maxsize=1)
def _steps(spec: Spec) -> tuple[chunked.Steps, dict[str, tuple[Any, ...]]]:
    """The kernels of a prefill, and what each takes."""
    qkv, b, a, weight, a_log, dt_bias, ring, state, start, lengths = arguments(Case(spec))
    config = pass_config(current_target(), qkv, state)
    step = chunked.steps(spec.length, qkv.dtype, state.shape, config)
    inputs = jax.jit(step.inputs)(qkv, weight, ring, start, lengths)
    gates = (inputs.queries, inputs.keys, b, a, a_log, dt_bias, lengths)
    overlap = jax.jit(step.overlap)(*gates)
    solution = jax.jit(step.inverse)(overlap.system, overlap.beta, lengths)
    return step, {
        "inputs": (qkv, weight, ring, start, lengths),
        "overlap": gates,
        "inverse": (overlap.system, overlap.beta, lengths),
        "passing": (inputs, solution, overlap, state, start, lengths, None),
    }


def _loop_seconds(loop: Callable[..., Any], carry: Any) -> float:
    """Time of one iteration of a compiled loop, which takes its carry and how often to run."""

    def run(carry: Any, repeats: int) -> tuple[Any, float]:
        count = jnp.int32(repeats)
        start = time.perf_counter()
        carry = jax.block_until_ready(loop(carry, count))
        return carry, time.perf_counter() - start

    carry, _ = run(carry, 1)
    carry, once = run(carry, 1)
    repeats, times = max(1, round(SECONDS_A_RUN / once)), []
    for _ in range(RUNS):
        carry, seconds = run(carry, repeats)
        times.append(seconds)
    return statistics.median(times) / repeats


def _chained_seconds(function: Callable[..., Any], arrays: tuple[Any, ...]) -> float:
    """Time of `function(*arrays)`, each call of which waits for the one before."""
    calls = 16

    @jax.jit
    def loop(carry: tuple[jax.Array, Any], repeats: jax.Array) -> tuple[jax.Array, Any]:
        def body(_: jax.Array, carry: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
            lengths, arrays = carry
            for _ in range(calls):
                first = jax.tree.leaves(function(*arrays, lengths))[0].reshape(-1)[0]
                # Zero, which the compiler cannot know.
                lengths += (first == 12345.678).astype(jnp.int32)
            return lengths, arrays

        return jax.lax.fori_loop(0, repeats, body, carry)

    return _loop_seconds(loop, (arrays[-1], arrays[:-1])) / calls


def _launched_seconds(function: Callable[..., Any], arrays: tuple[Any, ...]) -> float:
    """The same of calls that the host launches ahead; states are copied, since none is given up."""

    def run(repeats: int) -> float:
        start = time.perf_counter()
        for _ in range(repeats):
            result = function(*arrays)
        jax.block_until_ready(result)
        return (time.perf_counter() - start) / repeats

    run(2)
    repeats = max(2, round(SECONDS_A_RUN / run(2)))
    return statistics.median(run(repeats) for _ in range(RUNS))
