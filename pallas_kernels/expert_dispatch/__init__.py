"""`expert_dispatch`: see reference.py for the definition."""

from .reference import expert_dispatch

__all__ = ["expert_dispatch"]
