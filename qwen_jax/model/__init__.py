"""The Qwen decoder as Flax NNX modules that mirror the architecture, with Hugging Face's names."""

from .decoder import CausalLM, DecoderLayer, ModelOutput
from .initialise import initialise
from .routing import Capture, Router, RouterContext, Routing

__all__ = [
    "Capture",
    "CausalLM",
    "DecoderLayer",
    "ModelOutput",
    "Router",
    "RouterContext",
    "Routing",
    "initialise",
]
