"""`block_attention`: see api.py for what it takes, reference.py for the definition."""

from ..attention.scales import BlockScales
from .api import block_attention

__all__ = ["BlockScales", "block_attention"]
