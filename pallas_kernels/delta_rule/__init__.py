"""`gated_delta_rule`: see api.py for what it takes, reference.py for the definition."""

from .api import gated_delta_rule

__all__ = ["gated_delta_rule"]
