"""`router`: see api.py for what it takes, reference.py for the definition."""

from .api import router
from .reference import RouterOutput

__all__ = ["RouterOutput", "router"]
