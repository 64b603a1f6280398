"""A measurement with where it comes from, as JSON and as text."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from .bench_request import BenchRequest
from .console import size, table
from .measure import Note, measure
from .provenance import provenance


def run_bench(request: BenchRequest, note: Note, program: Sequence[str]) -> dict[str, Any]:
    """Measure, and put device, versions, commit and command beside the figures.

    Args:
        request: what to measure.
        note: told what is going on.
        program: how the program was called, without its arguments.
    """
    figures = measure(request, note)
    return {
        "benchmark": "bench",
        **provenance([*program, *request.arguments()]),
        "request": dataclasses.asdict(request),
        "figures": figures,
    }


def as_text(result: dict[str, Any]) -> str:
    """The result for a reader."""
    figures, request, device = result["figures"], result["request"], result["device"]
    model = figures["model"]
    shape = f"{model['num_layers']} layers, {model['dtype']}, {model['weights']} weights"
    if model["recipe"] is not None:
        shape += f", recipe {model['recipe']} of {model['bits']} bits"
    tokens = f"{request['prompt_tokens']} + {request['generation_tokens']}"
    rows = {
        "model": f"{model['name']} ({shape})",
        "device": f"{device['count']} x {device['kind']}",
        "work": f"{request['batch_size']} x ({tokens}) tokens, {request['num_trials']} trials",
        "prefill": _times(figures["prefill_seconds"], figures["prefill_tokens_per_second"]),
        "first token": _times(figures["first_token_seconds"]),
        "inter-token": _times(figures["inter_token_seconds"]) + ", each step a call of its own",
        "loop": _times(figures["loop_seconds_per_token"], figures["decode_tokens_per_second"])
        + ", all steps in one call",
        "weights": size(figures["weight_bytes"]),
        "cache": f"{size(figures['cache_bytes'])}, "
        f"keys and values in {request['kv_cache_dtype'] or model['dtype']}",
        "peak memory": size(figures["peak_memory_bytes"]),
        "compilation": f"{figures['compile_seconds']:.1f} s",
        "versions": ", ".join(f"{name} {version}" for name, version in result["versions"].items()),
        "commit": str(result["commit"] or "no checkout"),
    }
    return table(rows)


def _times(spread: dict[str, float], rate: float | None = None) -> str:
    text = f"median {spread['median'] * 1e3:.3f} ms, P99 {spread['p99'] * 1e3:.3f} ms"
    return text if rate is None else f"{text}, {rate:,.1f} tokens/s"
