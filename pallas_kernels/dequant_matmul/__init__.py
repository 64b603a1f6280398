"""`dequant_matmul`: see api.py for what it takes, layout.py for the codes, reference.py for it."""

from .api import dequant_matmul

__all__ = ["dequant_matmul"]
