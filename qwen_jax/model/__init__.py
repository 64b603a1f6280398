"""The Qwen decoder as Flax NNX modules that mirror the architecture, with Hugging Face's names."""

from .abstract import abstract_model, parameter_shapes
from .decoder import CausalLM, DecoderLayer, ModelOutput, check_model
from .flat import FlatModel, whole
from .initialise import initialise
from .intervention import Intervention
from .routing import Capture, Router, RouterContext, Routing
from .trace import RoutingTrace

__all__ = [
    "Capture",
    "CausalLM",
    "DecoderLayer",
    "FlatModel",
    "Intervention",
    "ModelOutput",
    "Router",
    "RouterContext",
    "Routing",
    "RoutingTrace",
    "abstract_model",
    "check_model",
    "initialise",
    "parameter_shapes",
    "whole",
]
