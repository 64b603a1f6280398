"""`expert_dispatch`: see api.py for what it takes, reference.py for the definition."""

from .api import expert_dispatch

__all__ = ["expert_dispatch"]
