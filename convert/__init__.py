"""Conversion of checkpoints: any released layout to the native one, and back.

`from_hf` and `to_hf` plan, `run` carries a plan out, `writing` writes folders. `logical` and
`formats` show quantised matrices as plain ones; `adapters` and `vocabulary` change tensors on
their way; `diff` and `self_check` look at the result. `python -m convert` is `qwen-jax convert`.

Other distributions also install a top-level module called `convert`: `__project__` lets a caller
tell this one from those before using it.
"""

__project__ = "qwen-jax"
