"""Experiments with routing: traces, counts and statistics; what an experiment needs, under jit."""

from .capture import Piece, collect, trace_text
from .counts import RoutingCounts
from .recorder import RoutingRecorder

__all__ = ["Piece", "RoutingCounts", "RoutingRecorder", "collect", "trace_text"]
