"""What a start takes: how old the process is, and what became of programs to compile."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import jax

from ..compile_time import CompileTime

# Of the compiling, in a warm start: programs that compile fast are never kept.
COMPILED_SHARE = 0.2
_IMPORTED = time.perf_counter()


def process_seconds() -> float:
    """Seconds since this process began; since this module was imported where that is not told."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        began = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - began
    except (OSError, AttributeError, IndexError):
        return time.perf_counter() - _IMPORTED


def compilation(before: CompileTime, after: CompileTime) -> dict[str, Any]:
    """What was compiled between two moments, ready for JSON.

    Returns:
        `seconds` of tracing, lowering, and compiling or reading back; `start`: "warm" if nearly all
        of the compiling was saved by the cache of compiled programs, else "cold";
        `programs_read` from it; `cold_seconds`: what all would take without it, by what its
        files say; `cache`: its folder, or None where it is switched off.
    """
    spent = after - before
    warm = spent.compiled < COMPILED_SHARE * (spent.compiled + spent.saved)
    enabled = getattr(jax.config, "jax_enable_compilation_cache", True)
    folder = getattr(jax.config, "jax_compilation_cache_dir", None)
    return {
        "seconds": spent.seconds,
        "start": "warm" if warm else "cold",
        "programs_read": spent.read,
        "cold_seconds": spent.seconds + spent.saved,
        "cache": folder if enabled else None,
    }
