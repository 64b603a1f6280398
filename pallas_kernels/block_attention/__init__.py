"""`block_attention`: see api.py for what it takes, reference.py for the definition."""

from .api import block_attention

__all__ = ["block_attention"]
