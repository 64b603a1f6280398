"""Qwen MoE models in JAX: load a checkpoint, generate inside `jax.jit`, open the router.

Names are loaded on first use, so that importing the package costs nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .cache import Cache as Cache
    from .cache import fork as fork
    from .cache import init_cache as init_cache
    from .cache import release as release
    from .config import QwenConfig as QwenConfig
    from .decode import DecodeState as DecodeState
    from .decode import FinishReason as FinishReason
    from .decode import SamplingOptions as SamplingOptions
    from .decode import SamplingParams as SamplingParams
    from .decode import StepOutput as StepOutput
    from .decode import decode_loop as decode_loop
    from .decode import decode_step as decode_step
    from .decode import init_state as init_state
    from .decode import prefill as prefill
    from .decode import prefill_prompts as prefill_prompts
    from .decode import sample as sample
    from .decode import stream as stream
    from .generation import generate as generate
    from .generation import stream_generate as stream_generate
    from .loading import load as load
    from .model import CausalLM as CausalLM
    from .model import initialise as initialise
    from .transcript import GenerationResult as GenerationResult

__version__ = "0.1.0"

_HOME = {
    "cache": ("Cache", "fork", "init_cache", "release"),
    "config": ("QwenConfig",),
    "decode": (
        "DecodeState",
        "FinishReason",
        "SamplingOptions",
        "SamplingParams",
        "StepOutput",
        "decode_loop",
        "decode_step",
        "init_state",
        "prefill",
        "prefill_prompts",
        "sample",
        "stream",
    ),
    "generation": ("generate", "stream_generate"),
    "loading": ("load",),
    "model": ("CausalLM", "initialise"),
    "transcript": ("GenerationResult",),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}
__all__ = list(_MODULE_OF)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_MODULE_OF[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
