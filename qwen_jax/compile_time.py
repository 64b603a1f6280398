"""How long JAX has spent tracing and compiling in this process, so that rates can leave it out."""

from __future__ import annotations

import dataclasses
import time

import jax.monitoring

_COMPILED = "/jax/core/compile/backend_compile_duration"
_PHASES = (
    "/jax/core/compile/jaxpr_trace_duration",
    "/jax/core/compile/jaxpr_to_mlir_module_duration",
    _COMPILED,
)
_SAVED = "/jax/compilation_cache/compile_time_saved_sec"
_READ = "/jax/compilation_cache/cache_hits"


@dataclasses.dataclass(frozen=True)
class CompileTime:
    """Of this process, since this module was imported.

    Attributes:
        seconds: of tracing, lowering and compiling, reading compiled programs included.
        compiled: seconds of these that programs took which were not read.
        saved: seconds that reading the others saved.
        read: programs from the cache of compiled programs.
    """

    seconds: float = 0.0
    compiled: float = 0.0
    saved: float = 0.0
    read: int = 0

    def __sub__(self, before: CompileTime) -> CompileTime:
        """What has been added since."""
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(before), strict=True)
        return CompileTime(*(new - old for new, old in pairs))


_total = CompileTime()
# Whether the program whose time comes next was read.
_was_read = False


def compile_time() -> CompileTime:
    """All there was so far."""
    return _total


def compile_seconds() -> float:
    """Seconds of tracing, lowering and compiling since this module was imported."""
    return _total.seconds


def _on_duration(event: str, duration_secs: float, **kwargs: str | int) -> None:
    global _was_read
    if event in _PHASES:
        _add(seconds=duration_secs)
    elif event == _SAVED:
        _add(saved=duration_secs)
    if event == _COMPILED:
        _add(compiled=0.0 if _was_read else duration_secs)
        _was_read = False


def _on_event(event: str, **kwargs: str | int) -> None:
    global _was_read
    if event == _READ:
        _add(read=1)
        _was_read = True


def _add(**amounts: float) -> None:
    global _total
    _total = dataclasses.replace(
        _total, **{name: getattr(_total, name) + amount for name, amount in amounts.items()}
    )


jax.monitoring.register_event_duration_secs_listener(_on_duration)
jax.monitoring.register_event_listener(_on_event)


def running_time() -> float:
    """A clock in seconds that stands still while JAX compiles; only differences mean anything."""
    return time.perf_counter() - _total.seconds
