"""The repeated work that is measured: prompts in, tokens out, in single steps and in one call."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..cache import Cache, init_cache
from ..decode import DecodeState, prefill_prompts, start
from ..decode.loop import raise_on_failure, run_steps
from ..decode.prompt import bucket, default_chunk_size, run_prefill
from ..memory import accelerator_memory
from ..model import CausalLM, FlatModel
from .bench_request import BenchRequest
from .kernel_profile import launches, split

# Enough to split a step by kernels.
PROFILED_STEPS = 16


@dataclasses.dataclass
class Samples:
    """Seconds of each measured event.

    Attributes:
        from_prompt: from prompts and no cache to the first token, as a caller waits for it who has
            flattened the model before.
        prefill: all prompts through the model, until their logits are there.
        first_token: the same, and the first token of each row drawn and read by the host.
        step: one decode step as a call of its own, its token awaited.
        loop: a whole generation but its first token in one call, divided by its steps.
    """

    from_prompt: list[float] = dataclasses.field(default_factory=list)
    prefill: list[float] = dataclasses.field(default_factory=list)
    first_token: list[float] = dataclasses.field(default_factory=list)
    step: list[float] = dataclasses.field(default_factory=list)
    loop: list[float] = dataclasses.field(default_factory=list)


class Trials:
    """One model and the prompts to run through it."""

    def __init__(self, model: CausalLM, request: BenchRequest) -> None:
        self._model = model
        self._flat = FlatModel.of(model)
        self._request = request
        shape = (request.batch_size, request.prompt_tokens)
        self._prompts = (
            np.random.default_rng(0).integers(0, model.config.vocab_size, shape).tolist()
        )

    def trial(self, samples: Samples) -> None:
        """Generate twice from the prompts: in single steps, and in one call."""
        steps = self._request.generation_tokens - 1
        state, cache = self._begin(samples)
        for _ in range(steps):
            begin = time.perf_counter()
            state, cache = self._steps(state, cache, 1)
            samples.step.append(time.perf_counter() - begin)
        raise_on_failure(state, cache)
        del state, cache

        state, cache = self._begin(samples)
        begin = time.perf_counter()
        state, cache = self._steps(state, cache, steps)
        samples.loop.append((time.perf_counter() - begin) / steps)
        raise_on_failure(state, cache)

    def profile(self, samples: Samples) -> dict[str, Any]:
        """Where the time of prefill and of a step goes, from runs of their own; see `split`.

        Args:
            samples: measured before.
        """
        steps = min(PROFILED_STEPS, self._request.generation_tokens - 1)
        state, cache = self._begin(Samples())

        def single_steps() -> None:
            # Of a loop that is one graph, the profiler sees one step alone.
            nonlocal state, cache
            for _ in range(steps):
                state, cache = self._steps(state, cache, 1)

        loop = launches(single_steps)
        if not loop:
            return {"absent": "the profiler saw no kernels; it may not be allowed to"}
        del state, cache
        cache = self._cache()
        prompt = launches(lambda: self._prefill(cache))
        passes = -(-self._request.prompt_tokens // self._chunk_size)
        return {
            "step": split(loop, steps, float(np.median(samples.loop))),
            "prefill": split(prompt, 1, float(np.median(samples.prefill)), passes=passes),
        }

    def programs(self) -> Iterator[jax.stages.Lowered]:
        """What takes long to compile: prefill of chunks of each width, and the loop.

        A trial finds what was compiled of these before.
        """
        rows, new = self._request.batch_size, self._request.generation_tokens
        largest, asked = self._chunk_size, self._request.prompt_tokens
        widths = {bucket(min(largest, asked - at), largest) for at in range(0, asked, largest)}
        cache = jax.eval_shape(self._empty_cache)
        lengths, number = jax.ShapeDtypeStruct((rows,), np.int32), jax.ShapeDtypeStruct((), "int32")
        for width in sorted(widths):
            tokens = jax.ShapeDtypeStruct((rows, width), np.int32)
            yield run_prefill.lower(self._flat, cache, tokens, lengths, intervention=None)
        logits = jax.ShapeDtypeStruct((rows, self._model.config.vocab_size), jnp.float32)
        state = jax.eval_shape(lambda x, n: start(x, max_tokens=n, capacity=new), logits, number)
        yield run_steps.lower(self._flat, cache, state, max_steps=number)

    def _begin(self, samples: Samples) -> tuple[DecodeState, Cache]:
        request = self._request
        asked = time.perf_counter()
        cache = self._cache()
        begin = time.perf_counter()
        logits, cache = self._prefill(cache)
        samples.prefill.append(time.perf_counter() - begin)
        state = start(
            logits,
            max_tokens=jnp.asarray(request.generation_tokens, jnp.int32),
            capacity=request.generation_tokens,
        )
        jax.device_get(state.last)
        done = time.perf_counter()
        samples.first_token.append(done - begin)
        samples.from_prompt.append(done - asked)
        return state, cache

    @property
    def _chunk_size(self) -> int:
        request = self._request
        return request.prefill_chunk_size or default_chunk_size(
            request.batch_size, accelerator_memory()
        )

    def _empty_cache(self) -> Cache:
        request = self._request
        return init_cache(
            self._model.config,
            request.batch_size,
            request.length,
            kv_cache_dtype=request.kv_cache_dtype,
        )

    def _cache(self) -> Cache:
        return jax.block_until_ready(self._empty_cache())

    def _prefill(self, cache: Cache) -> tuple[jax.Array, Cache]:
        size = self._chunk_size
        return jax.block_until_ready(
            prefill_prompts(self._model, cache, self._prompts, chunk_size=size, flat=self._flat)
        )

    def _steps(self, state: DecodeState, cache: Cache, steps: int) -> tuple[DecodeState, Cache]:
        state, cache = run_steps(self._flat, cache, state, max_steps=jnp.int32(steps))
        jax.device_get(state.last)
        return state, cache


def figures_of(samples: Samples, request: BenchRequest) -> dict[str, Any]:
    """Times and rates, ready for JSON."""
    rows = request.batch_size
    return {
        "prefill_seconds": spread(samples.prefill),
        "prefill_tokens_per_second": rows
        * request.prompt_tokens
        / float(np.median(samples.prefill)),
        "first_token_seconds": spread(samples.first_token),
        "inter_token_seconds": spread(samples.step),
        "loop_seconds_per_token": spread(samples.loop),
        "decode_tokens_per_second": rows / float(np.median(samples.loop)),
    }


def spread(values: list[float]) -> dict[str, float | int]:
    """Median, 99th percentile (interpolated) and number of measurements."""
    if not values:
        return {"median": math.nan, "p99": math.nan, "count": 0}
    return {
        "median": float(np.median(values)),
        "p99": float(np.percentile(values, 99)),
        "count": len(values),
    }
