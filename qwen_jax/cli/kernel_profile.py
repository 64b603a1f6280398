"""Where the time of a program goes on a GPU, by part of the model, from a profile."""

from __future__ import annotations

import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from .kernel_groups import GROUPS, Event, groups_of

MOST_KERNELS = 40


def absence() -> str | None:
    """Why there is no profile on this device; None if there is."""
    platform = jax.default_backend()
    if platform == "gpu":
        return None
    return f"kernels are told apart on a GPU alone, and this is a {platform}"


def launches(run: Callable[[], object]) -> list[Event]:
    """Every kernel that a call runs on the GPU, in the order of their start.

    Args:
        run: to be profiled; compiled already, and done when it returns.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        files = list(Path(folder).glob("**/*.xplane.pb"))
        return sorted((e for f in files for e in _read(f)), key=lambda event: event.start)


def _read(file: Path) -> Iterator[Event]:
    """The launches that a profile's file holds."""
    for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
        if "GPU" not in plane.name:
            continue
        for line in plane.lines:
            if "Stream" in line.name:
                for event in line.events:
                    yield Event(event.name, event.start_ns, event.duration_ns)


def split(
    events: Sequence[Event], steps: int, seconds: float, *, passes: int = 1
) -> dict[str, Any]:
    """Seconds a step of each part of the model.

    Args:
        events: launches of so many steps, in order.
        steps: by which times are divided.
        seconds: of a step, as measured without a profile.
        passes: of the model in a step.

    Returns:
        `groups`: seconds by part; launches at the same time share it. `gaps`: the step's seconds
        without those, when nothing ran. `launches`: of a step. `kernels`: the longest, with group,
        launches a step, seconds a step, which they share likewise, and the median of how long one
        ran.
    """
    totals: dict[str, float] = {group: 0.0 for group in GROUPS}
    kernels: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    of_events = events, groups_of(events, steps * passes), _shares(events)
    for event, group, share in zip(*of_events, strict=True):
        totals[group] += share * 1e-9
        kernels[event.name, group].append((share * 1e-9, event.duration * 1e-9))
    times = {each: tuple(zip(*pairs, strict=True)) for each, pairs in kernels.items()}
    longest = sorted(times.items(), key=lambda item: -sum(item[1][0]))[:MOST_KERNELS]
    groups = {group: total / steps for group, total in totals.items()}
    return {
        "seconds": seconds,
        "groups": groups,
        "gaps": seconds - sum(groups.values()),
        "launches": len(events) / steps,
        "kernels": [
            {
                "name": name,
                "group": group,
                "launches": len(durations) / steps,
                "median": statistics.median(durations),
                "seconds": sum(shares) / steps,
            }
            for (name, group), (shares, durations) in longest
        ],
    }


def _shares(events: Sequence[Event]) -> list[float]:
    """How long each launch ran, the time that it shares with others divided by how many ran."""
    some = [(event, index) for index, event in enumerate(events) if event.duration > 0]
    ends = [(event.start + event.duration, False, index) for event, index in some]
    begins = [(event.start, True, index) for event, index in some]
    shares, running, before = [0.0] * len(events), set[int](), 0.0
    for time, begun, index in sorted(ends + begins):
        for each in running:
            shares[each] += (time - before) / len(running)
        before = time
        if begun:
            running.add(index)
        else:
            running.discard(index)
    return shares
