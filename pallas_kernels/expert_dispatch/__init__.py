"""`expert_dispatch`: see api.py for what it takes, reference.py for the definition."""

from .api import expert_dispatch
from .shared import SharedExpert

__all__ = ["SharedExpert", "expert_dispatch"]
