"""What differs between versions of JAX and between devices, kept in this one file.

Kernels are written for the Triton backend of Pallas: the same source serves JAX 0.10 to 0.12. It is
deprecated since 0.11, so everything that names it is here or in an operation's `triton.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from jaxtyping import Array, Float

INTERPRETER = "interpreter"

# Shared memory that one program may use, in KiB, by compute capability.
_SHARED_MEMORY = {(8, 0): 163, (8, 6): 99, (8, 7): 163, (8, 9): 99, (9, 0): 227, (10, 0): 227}


@dataclasses.dataclass(frozen=True)
class Target:
    """The device that a call is traced for.

    Attributes:
        platform: JAX's name ("gpu", "cpu", "tpu"), or "interpreter" where kernels are interpreted.
        kind: JAX's name of the device's kind.
        cores: streaming multiprocessors.
        capability: NVIDIA's compute capability; (0, 0) for any other device.
    """

    platform: str
    kind: str
    cores: int = 1
    capability: tuple[int, int] = (0, 0)

    @property
    def shared_memory(self) -> int:
        """Bytes of shared memory that one program may use; the smallest known if unknown."""
        return 1024 * _SHARED_MEMORY.get(self.capability, min(_SHARED_MEMORY.values()))

    @property
    def spares_registers(self) -> bool:
        """Whether tensor cores take operands out of shared memory, from compute capability 9.0 on.

        Before, they lie in registers beside the sums, and the same tiles spill.
        """
        return self.platform != "gpu" or self.capability >= (9, 0)


H200 = Target("gpu", "NVIDIA H200", 132, (9, 0))

# JAX traces again where its value changes.
_forced = jax.make_user_context(default_value=None)


@contextlib.contextmanager
def targeting(target: Target) -> Iterator[None]:
    """Calls traced inside are for this device, whatever JAX runs on."""
    with _forced(target):
        yield


def current_target() -> Target:
    """The device that a call traced now is for."""
    forced = _forced.value
    if forced is not None:
        return forced
    device = getattr(jax.config, "jax_default_device", None)
    if device is None or isinstance(device, str):
        device = jax.devices(device)[0]
    capability = str(getattr(device, "compute_capability", ""))
    major, _, minor = capability.partition(".")
    known = major.isdecimal() and minor.isdecimal()
    return Target(
        device.platform,
        device.device_kind,
        int(getattr(device, "core_count", 1)),
        (int(major), int(minor)) if known else (0, 0),
    )


def triton_refusals(target: Target) -> list[str]:
    """Why no Triton kernel at all runs on this device; empty if they do."""
    if target.platform == INTERPRETER:
        return []
    if target.platform != "gpu":
        return [f"it needs a GPU, and the call is for {target.platform}"]
    if target.capability < (8, 0):
        return [
            "it needs an NVIDIA GPU of compute capability 8.0 or later, and the call is for "
            f"{target.kind}"
        ]
    return []


def mosaic_refusals(target: Target) -> list[str]:
    """Why no Mosaic GPU kernel runs on this device, or with this JAX; empty if they do."""
    if target.platform != "gpu":
        return [f"it needs a GPU, and the call is for {target.platform}"]
    if target.capability != (9, 0):
        return [
            f"it needs an NVIDIA GPU of compute capability 9.0, and the call is for {target.kind}"
        ]
    if jax.__version_info__ < (0, 11):
        return [f"it needs JAX 0.11 or later, and this is {jax.__version__}"]
    return []


def triton_call(
    kernel: Callable[..., None], *, num_warps: int, num_stages: int, **options: Any
) -> Callable[..., Any]:
    """`pl.pallas_call` on the Triton backend, or interpreted where the target says so.

    Args:
        kernel: the kernel's body.
        num_warps: warps a program.
        num_stages: how many iterations ahead loads are issued, in loops whose loads feed a dot.
        options: `name`, `grid`, `out_shape`, ... of `pl.pallas_call`.
    """
    return pl.pallas_call(
        kernel,
        # Without parameters, JAX 0.10 would lower to another backend.
        compiler_params=plt.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        interpret=current_target().platform == INTERPRETER,
        **options,
    )


def dot(a: Float[Array, "m k"], b: Float[Array, "k n"]) -> Float[Array, "m n"]:
    """Matrix product inside a kernel, on tensor cores, summed in float32.

    Float32 operands keep float32's accuracy: they are split and multiplied as three TF32 products.
    """
    precision = None
    if a.dtype == jnp.float32 and current_target().platform != INTERPRETER:
        precision = jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3
    return jnp.dot(a, b, precision=precision, preferred_element_type=jnp.float32)


def multiply_add(
    a: Float[Array, "*s"], b: float | Float[Array, "..."], c: Float[Array, "..."]
) -> Float[Array, "*s"]:
    """A * b + c inside a kernel, in one instruction, which the Triton backend makes of no sum."""
    b = jnp.full(a.shape, b, jnp.float32) if isinstance(b, float) else jnp.broadcast_to(b, a.shape)
    c = jnp.broadcast_to(c, a.shape)
    if current_target().platform == INTERPRETER:
        return a * b + c
    return plt.elementwise_inline_asm(
        "fma.rn.f32 $0, $1, $2, $3;",
        args=[a, b, c],
        constraints="=f,f,f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(a.shape, jnp.float32)],
    )[0]


def assembled(
    text: str,
    args: list[Array],
    constraints: str,
    result: jax.ShapeDtypeStruct | None = None,
) -> Float[Array, "..."]:
    """Several instructions on each element.

    Elements come one by one: which of them would come together depends on the compiler's layout.

    Args:
        text: PTX, with $0 for the result and $1, $2, ... for the arguments.
        args: of one shape.
        constraints: LLVM's, of the result and each argument.
        result: its shape and dtype; float32 if None.
    """
    return plt.elementwise_inline_asm(
        text,
        args=args,
        constraints=constraints,
        pack=1,
        result_shape_dtypes=[result or jax.ShapeDtypeStruct(args[0].shape, jnp.float32)],
    )[0]


@contextlib.contextmanager
def deprecation_expected() -> Iterator[None]:
    """Hides the one warning that JAX 0.11 and later give when they lower a Triton kernel."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "The Pallas Triton backend is deprecated", DeprecationWarning
        )
        yield


def lower_for_cuda(function: Callable[..., Any], *args: Any, target: Target = H200) -> str:
    """The module that JAX would give to XLA for this GPU, as text; no GPU is needed.

    JAX 0.11 and later ask for a device when they lower for CUDA, and take a described one.

    Args:
        function: what to lower; its kernels are chosen for `target`.
        args: arrays, or shapes and dtypes, of its arguments.
        target: the GPU.
    """
    described = AbstractDevice(target.kind, target.cores, "gpu")
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=described)
    fresh = jax.jit(lambda *args: function(*args))
    with targeting(target), deprecation_expected(), jax.sharding.use_abstract_mesh(mesh):
        return fresh.trace(*args).lower(lowering_platforms=("cuda",)).as_text()
