"""What JAX and XLA read from the environment on import. A user's own settings always win.

Compiled programs are kept in `~/.cache/qwen-jax/xla` (or below `XDG_CACHE_HOME`), where the next
process finds them. `JAX_COMPILATION_CACHE_DIR` names another folder;
`JAX_ENABLE_COMPILATION_CACHE=false` keeps none.
"""

from __future__ import annotations

import os
from pathlib import Path

_DEFAULTS = {
    # Programs that compile faster than this are not worth a file.
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
    # XLA's C++ code logs at length; errors still pass.
    "TF_CPP_MIN_LOG_LEVEL": "2",
}
_MEMORY_FRACTION = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")


class DeviceError(RuntimeError):
    """JAX has no device of the kind that it is told to use."""


def default_platform() -> str:
    """The platform of JAX's default device: "cpu", "gpu".

    Raises:
        DeviceError: JAX cannot start.
    """
    import jax

    try:
        return jax.default_backend()
    except (RuntimeError, AssertionError) as error:  # the latter where no plugin is installed
        asked, why = os.environ.get("JAX_PLATFORMS", ""), str(error) or "no such plugin"
        raise DeviceError(
            f"JAX finds no device (JAX_PLATFORMS is {asked!r}; {why}); for NVIDIA install "
            "qwen-jax[cuda13], or set JAX_PLATFORMS=cpu"
        ) from error


def prepare_environment() -> None:
    """Let commands start fast, quietly, and with the whole device. Call before JAX is imported."""
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    if not any(name in os.environ for name in _MEMORY_FRACTION):
        # JAX takes three quarters for itself, to leave room for other programs; a command is alone.
        os.environ[_MEMORY_FRACTION[0]] = "0.9"
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        folder = compilation_cache()
        if folder is not None:
            os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder)


def compilation_cache() -> Path | None:
    """The user's folder for compiled programs; None where it cannot be made."""
    home = os.environ.get("XDG_CACHE_HOME")
    try:
        folder = Path(home or Path.home() / ".cache") / "qwen-jax" / "xla"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):
        return None
    return folder if os.access(folder, os.W_OK) else None
