"""How long JAX has spent tracing and compiling in this process, so that rates can leave it out."""

import time

import jax.monitoring

_PHASES = (
    "/jax/core/compile/jaxpr_trace_duration",
    "/jax/core/compile/jaxpr_to_mlir_module_duration",
    "/jax/core/compile/backend_compile_duration",
)
_seconds = 0.0


def compile_seconds() -> float:
    """Seconds of tracing, lowering and compiling since this module was imported."""
    return _seconds


def _add(event: str, duration_secs: float, **kwargs: str | int) -> None:
    global _seconds
    if event in _PHASES:
        _seconds += duration_secs


jax.monitoring.register_event_duration_secs_listener(_add)


def running_time() -> float:
    """A clock in seconds that stands still while JAX compiles; only differences mean anything."""
    return time.perf_counter() - _seconds
