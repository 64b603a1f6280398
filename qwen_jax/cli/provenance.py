"""Where a result comes from: device, versions, commit, command."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parents[1]


def provenance(command: Sequence[str]) -> dict[str, Any]:
    """Everything that somebody needs to repeat a measurement, ready for JSON."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(command),
        "commit": commit(),
        "device": device(),
        "versions": versions(),
    }


def device() -> dict[str, Any]:
    """The devices that JAX sees."""
    import jax

    first = jax.devices()[0]
    return {
        "platform": first.platform,
        "kind": first.device_kind,
        "count": jax.device_count(),
        "runtime": first.client.platform_version,
        "host": f"{platform.system()} {platform.machine()}",
    }


def versions() -> dict[str, str]:
    """Versions of what a result depends on."""
    import flax
    import jax
    import numpy

    from .. import __version__

    return {
        "qwen_jax": __version__,
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "flax": flax.__version__,
        "numpy": numpy.__version__,
    }


def commit() -> str | None:
    """The commit of the checkout that this package runs from, with "-dirty" where files differ."""
    # An installed package may lie inside somebody else's repository.
    if _git("ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    head = _git("rev-parse", "HEAD")
    changed = _git("status", "--porcelain", "--untracked-files=no")
    return f"{head}-dirty" if head and changed else head


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(PACKAGE), *arguments], capture_output=True, text=True
        )
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
