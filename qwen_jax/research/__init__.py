"""Research on routing: traces, counts and statistics; interventions, and further routers."""

from .capture import Piece, collect, trace_text
from .counts import RoutingCounts
from .recorder import RoutingRecorder
from .report import Report
from .summary import Summary, summarise
from .trace import join_traces, load_trace, save_trace, trace_of

__all__ = [
    "Piece",
    "Report",
    "RoutingCounts",
    "RoutingRecorder",
    "Summary",
    "collect",
    "join_traces",
    "load_trace",
    "save_trace",
    "summarise",
    "trace_of",
    "trace_text",
]
