"""What XLA is told of the large programs."""

LOOP_OPTIONS = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,"
    "DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE",
    "xla_gpu_command_buffer_scheduling_mode": "CONCURRENT",
}
"""For `jax.jit(..., compiler_options=LOOP_OPTIONS)` around a decode loop: on an NVIDIA GPU the loop
is one CUDA graph, whose predicate the device reads itself, and in which launches wait for those
alone whose results they read; by default XLA asks the host each step, and lets each wait for all.
Elsewhere it changes nothing. JAX takes such options for the outermost jit alone."""

PREFILL_OPTIONS = {"xla_gpu_dot_merger_threshold_mb": 1}
"""Likewise around `prefill`. By default XLA joins products of the same rows, and to do so copies
their matrices, up to 32 MB of each: small ones alone are worth it."""
