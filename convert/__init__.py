"""Conversion of checkpoints from one layout to another. Holds no converter yet.

Other distributions also install a top-level module called `convert`: `__project__` lets a caller
tell this one from those before using it.
"""

__project__ = "qwen-jax"
