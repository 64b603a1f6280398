"""The hot operations of the Qwen models, as functions on arrays.

One folder an operation. `reference.py` is its definition in plain jax.numpy; kernels stand beside
it behind the same signature. This package knows arrays only: nothing of modules, configurations or
checkpoints.
"""

from .block_attention import block_attention
from .delta_rule import gated_delta_rule
from .expert_dispatch import expert_dispatch
from .flash_attention import flash_attention

__all__ = ["block_attention", "expert_dispatch", "flash_attention", "gated_delta_rule"]
