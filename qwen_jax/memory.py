"""How much memory the device has, and the refusal of what cannot fit."""

import os

import jax

from .errors import MemoryLimitError


def available_memory() -> int:
    """Bytes that the default device can still give; the host's free memory where it is the host."""
    stats = jax.devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    return _available_host_memory()


def accelerator_memory() -> int | None:
    """Bytes that the default device lets JAX use in all; None where it is the host."""
    stats = jax.devices()[0].memory_stats()
    return stats["bytes_limit"] if stats and "bytes_limit" in stats else None


def peak_memory() -> int:
    """Peak bytes in use on the default device; peak resident memory where it is the host."""
    stats = jax.devices()[0].memory_stats()
    if stats and "peak_bytes_in_use" in stats:
        return stats["peak_bytes_in_use"]
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def refuse_unless_fits(needed: int, what: str) -> None:
    """Raise `MemoryLimitError` with both numbers where the device has less than `needed` bytes."""
    available = available_memory()
    if needed > available:
        raise MemoryLimitError(
            f"{what} needs {needed / 1e9:.2f} GB, but {available / 1e9:.2f} GB are available on "
            f"{jax.devices()[0].device_kind}; use a smaller model or context, dtype bfloat16, or "
            f"a larger device"
        )


def _available_host_memory() -> int:
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
