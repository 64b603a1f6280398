"""The hot operations of the Qwen models, as functions on arrays.

One folder an operation, such as `from pallas_kernels.block_attention import block_attention`.
`reference.py` is its definition in plain jax.numpy; kernels will stand beside it behind the same
signature. This package knows arrays only: nothing of modules, configurations or checkpoints.
"""
