"""Prefill, decode step and decode loop: pure functions over a model and a cache, and drivers."""

from .loop import decode_loop, start, stream
from .options import LOOP_OPTIONS, PREFILL_OPTIONS
from .prompt import prefill_prompts
from .sampling import SamplingOptions, SamplingParams, sample
from .state import DecodeState, FinishReason, Observer, Steering, init_state
from .step import StepOutput, decode_step, prefill

__all__ = [
    "LOOP_OPTIONS",
    "PREFILL_OPTIONS",
    "DecodeState",
    "FinishReason",
    "Observer",
    "SamplingOptions",
    "SamplingParams",
    "Steering",
    "StepOutput",
    "decode_loop",
    "decode_step",
    "init_state",
    "prefill",
    "prefill_prompts",
    "sample",
    "start",
    "stream",
]
