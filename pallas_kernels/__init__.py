"""The hot operations of the Qwen models, as functions on arrays.

One folder an operation, such as `from pallas_kernels.block_attention import block_attention`:

    api.py        what it takes and returns, and the table of its implementations
    reference.py  its definition in plain jax.numpy
    triton.py     a Pallas kernel on the Triton backend: what it takes, and its call
    specs.py      the shapes that tests, benchmarks and the compile check use

`attention/` is no operation but what several of them share. `dispatch.py` picks the implementation
of a call; `tuning.py` knows how work was best cut where that was measured. This package knows
arrays only: nothing of modules, configurations or checkpoints.
"""
