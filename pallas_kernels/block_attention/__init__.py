"""`block_attention`: see api.py for what it takes, reference.py for the definition."""

from .api import block_attention
from .scales import BlockScales

__all__ = ["BlockScales", "block_attention"]
