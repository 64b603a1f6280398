"""`flash_attention`: see reference.py for the definition."""

from .reference import flash_attention

__all__ = ["flash_attention"]
