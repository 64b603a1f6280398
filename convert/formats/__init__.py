"""Quantised checkpoint formats, read as bfloat16: one file a format.

`matching` sorts the keys of a folder into matrices, `settings` reads the configuration, and each
format has a `match` that checks shapes and builds a matrix, which then reads rows.
"""

from .matching import find_matrices, read_settings
from .quantised import Found, Quantised

__all__ = ["Found", "Quantised", "find_matrices", "read_settings"]
