"""`block_attention`: see reference.py for the definition."""

from .reference import block_attention

__all__ = ["block_attention"]
