"""`gated_delta_rule`: see reference.py for the definition."""

from .reference import gated_delta_rule

__all__ = ["gated_delta_rule"]
