"""A measurement with where it comes from, as JSON and as text."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from .bench_request import BenchRequest
from .console import size, table
from .measure import Note, Prepared, measure
from .provenance import provenance


def run_bench(
    request: BenchRequest, note: Note, program: Sequence[str], prepared: Prepared | None = None
) -> dict[str, Any]:
    """Measure, and put device, versions, commit and command beside the figures.

    Args:
        request: what to measure.
        note: told what is going on.
        program: how the program was called, without its arguments.
        prepared: the model, if it is there; see `measure`.
    """
    figures = measure(request, note, prepared)
    return {
        "benchmark": "bench",
        **provenance([*program, *request.arguments()]),
        "request": dataclasses.asdict(request),
        "figures": figures,
    }


def as_text(result: dict[str, Any]) -> str:
    """The result for a reader; what it does not know is left out."""
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
        "peak memory": _peak(figures["peak_memory_bytes"]),
        "compilation": _compilation(figures["compilation"]),
        "start": _start(figures),
        "experts": _experts(figures["experts"], model["weights"]),
        "limit": _limit(figures["limit"]),
        **_profile(figures["profile"]),
        "versions": ", ".join(f"{name} {version}" for name, version in result["versions"].items()),
        "commit": str(result["commit"] or "no checkout"),
    }
    return table({name: text for name, text in rows.items() if text})


def _times(spread: dict[str, float], rate: float | None = None) -> str:
    text = f"median {spread['median'] * 1e3:.3f} ms, P99 {spread['p99'] * 1e3:.3f} ms"
    return text if rate is None else f"{text}, {rate:,.1f} tokens/s"


def _peak(nbytes: int | None) -> str:
    return "" if nbytes is None else size(nbytes)


def _start(figures: dict[str, Any]) -> str:
    if "start_seconds" not in figures:
        return ""
    return (
        f"{figures['start_seconds']:.1f} s from the start of the process to the first "
        f"token, making or loading weights left out, compilation {figures['compilation']['start']}"
    )


def _compilation(made: dict[str, Any] | None) -> str:
    if made is None:
        return ""
    if made["start"] == "warm":
        return (
            f"{made['seconds']:.1f} s warm ({made['programs_read']} programs from "
            f"{made['cache']}), {made['cold_seconds']:.1f} s cold"
        )
    kept = "no cache of compiled programs"
    if made["cache"] is not None:
        kept = f"programs are now in {made['cache']}; run again for a warm start"
    return f"{made['cold_seconds']:.1f} s cold; {kept}"


def _experts(experts: dict[str, Any] | None, weights: str) -> str:
    if experts is None:
        return ""
    routing = "random weights route about evenly" if weights == "random" else "counted as if even"
    return (
        f"{experts['per_token']} of {experts['experts']} a token and layer; "
        f"{experts['expected_distinct']:.1f} different ones expected a step ({routing})"
    )


def _limit(limit: dict[str, Any]) -> str:
    parts = [f"{name} {size(nbytes)}" for name, nbytes in limit["parts"].items() if nbytes]
    return (
        f"{size(limit['bytes_per_step'])} a step must move ({', '.join(parts)}; at "
        f"{limit['context']} tokens of context), {limit['share']:.1%} of what a copy of "
        f"{size(limit['copied_bytes'])} does here, {size(limit['copy_bytes_per_second'])}/s"
    )


def _profile(profile: dict[str, Any]) -> dict[str, str]:
    """A row for a step and one for prefill: milliseconds and share by part of the model."""
    if "absent" in profile:
        return {"profile": f"none: {profile['absent']}"}
    return {f"{phase} time": _split(profile[phase]) for phase in ("step", "prefill")}


def _split(part: dict[str, Any]) -> str:
    times = sorted(part["groups"].items(), key=lambda item: -item[1])
    times = [(name, seconds) for name, seconds in times if seconds] + [("gaps", part["gaps"])]
    cells = [
        f"{name} {seconds * 1e3:.3f} ms ({seconds / part['seconds']:.0%})"
        for name, seconds in times
    ]
    return f"{part['seconds'] * 1e3:.3f} ms, {part['launches']:,.0f} launches: {', '.join(cells)}"
