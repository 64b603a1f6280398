"""`flash_attention`: see api.py for what it takes, reference.py for the definition."""

from .api import flash_attention

__all__ = ["flash_attention"]
