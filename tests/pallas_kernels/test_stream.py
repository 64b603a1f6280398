"""Experts whose codes stream through shared memory: which calls do, and their sum on a GPU."""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._compat import H200, Target, lower_for_cuda
from pallas_kernels.expert_dispatch import mosaic_gpu
from pallas_kernels.expert_dispatch.api import OPERATION
from pallas_kernels.expert_dispatch.specs import SPECS, Spec
from pallas_kernels.expert_dispatch.stream import TURN, streams
from tests.pallas_kernels.expert_calls import WHOLE, check_call, drawn, small

needs_mosaic = pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="Mosaic GPU kernels are written for JAX 0.11 and later"
)
# Of most experts more slots than a row holds, of one none; tiles and lines of every kind.
CALLS = {
    name: dataclasses.replace(spec, x="bfloat16")
    for name, spec in {
        "3 bits": small(3, 3, tokens=19, width=1024, hidden=512),
        "4 and 3 bits, lines of 32 bytes": small(4, 3, tokens=33, width=1024, hidden=768),
        "3 and 4 bits, alone": small(3, 4, tokens=64, width=2048, hidden=256, shared_hidden=0),
        "eight tokens": small(3, 3, tokens=8, width=1024, hidden=768, group_size=128),
        "arrays beside": small(3, 3, tokens=9, width=1024, hidden=512, shared_bits=16),
        "groups of 128": small(3, 3, tokens=16, width=2048, hidden=512, group_size=128),
    }.items()
}


def _refusals(spec: Spec, target: Target = H200, **more) -> str:
    return "; ".join(mosaic_gpu.refusals(target, *spec.arguments(), **(spec.settings() | more)))


@needs_mosaic
@pytest.mark.parametrize("name", [*CALLS, "16 tokens", "32 tokens", "64 tokens"])
def test_what_is_streamed(name):
    assert not _refusals(CALLS.get(name) or SPECS[name])


@needs_mosaic
@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (Spec(7), "7 tokens"),
        (Spec(32, bits=8), "gate_up_proj has codes of 8 bits"),
        (Spec(32, down_bits=16), "down_proj is not in codes"),
        (Spec(32, zero=True), "gate_up_proj has zero points"),
        (Spec(32, group_size=32), "down_proj has groups of 32"),
        (Spec(32, inner="float32"), "inner_dtype is float32"),
        (Spec(32, hidden=520), "520x2048 is not cut into 256 inputs and 32 outputs"),
        (Spec(32, width=2304), "2304 inputs are not cut into lines of 32 bytes"),
        (Spec(32, width=16384), "3 tiles of 512x16384 need more than 232448 bytes"),
        # Half the bands would leave four groups three stages, of which barriers lose count.
        (Spec(32, hidden=1536, down_bits=4), "3 tiles of 2048x1536 need more than 232448 bytes"),
        (small(3, 3, tokens=32, width=256, hidden=256), "256x256 is 2 tiles, not more than 3"),
        (Spec(32, experts=65537), "gate_up_proj has 65537 experts, more than 65536"),
    ],
)
def test_what_is_not_streamed(spec, reason):
    assert reason in _refusals(spec)
    choice = OPERATION.choose(
        *spec.arguments(), implementation=None, target=H200, **spec.settings()
    )
    assert choice.chosen in ("triton", "reference")


@needs_mosaic
def test_what_no_kernel_takes_is_not_streamed():
    *arrays, shared = Spec(32).arguments()
    other = dataclasses.replace(shared, up_proj=Spec(32, shared_bits=3).arguments()[-1].up_proj)
    reasons = mosaic_gpu.refusals(H200, *arrays, other, **Spec(32).settings())
    assert "shared gate_proj and up_proj are not stored alike" in reasons
    whole = dataclasses.replace(shared, down_proj=jax.ShapeDtypeStruct((2048, 512), jnp.float16))
    reasons = mosaic_gpu.refusals(H200, *arrays, whole, **Spec(32).settings())
    assert "shared down_proj is float16, not bfloat16 or float32" in reasons


def test_what_it_runs_on():
    spec = Spec(32)
    assert "compute capability 9.0" in _refusals(spec, Target("gpu", "NVIDIA A10", 72, (8, 6)))
    assert "it needs a GPU" in _refusals(spec, Target("cpu", "cpu"))
    if jax.__version_info__ < (0, 11):
        assert "it needs JAX 0.11" in _refusals(spec)


@pytest.mark.parametrize("spec", [*CALLS.values(), *(Spec(n) for n in (8, 9, 16, 32, 64))])
def test_tiles_fit_into_shared_memory(spec):
    _, ids, _, up, below, _ = spec.arguments()
    for stream in streams(up, below, ids, H200.shared_memory):
        stages = stream.stages(H200.shared_memory)
        own = stages * (stream.codes + stream.scales) + 8 * stream.token + stream.sums
        assert own < H200.shared_memory
        # A row of slots keeps its inputs until another two rows behind it needs their place.
        assert max(3, stream.cut.groups) <= stages < stream.tiles
        assert stream.threads * 64 <= 65536


def test_what_gates_write_is_what_down_projections_read():
    """The place that the kernel's bits say, against the order's formula."""
    column = np.arange(4 * 128)
    unit, piece = column >> 5 & 3, column >> 3 & 3
    place = (column & ~0x78) + piece * 32 + unit * 8
    np.testing.assert_array_equal(TURN.place_of(jnp.asarray(column)), place)


@needs_mosaic
@pytest.mark.parametrize("name", ["32 tokens", *CALLS])
def test_streams_lower_for_cuda(name):
    """Two launches of it, and of Triton the order and the sum; others are the shared expert's."""
    spec = CALLS.get(name) or SPECS[name]
    run = functools.partial(OPERATION, implementation=None, **spec.settings())
    text = lower_for_cuda(run, *spec.arguments())
    kernels = re.findall(r'name = "(\w+)', text)
    coded = spec.shared_hidden and spec.shared_bits < 16
    # The whole size's stream, too.
    streamed = 2 if name == "32 tokens" else 0
    assert text.count("mosaic_gpu_v2") == 2 + streamed
    products = ["dequant_matmul_some_rows"] * (2 - streamed if coded else 0)
    assert kernels == ["expert_dispatch_order", *products, "expert_dispatch_sum"]
    assert text.count("xla.gpu.triton") == len(kernels)
    found = set(re.findall(r"stablehlo\.(\w+)", text))
    if not spec.shared_hidden:
        assert found == {"custom_call", "reshape"}
    assert ("dot_general" in found) == bool(spec.shared_hidden and not coded)


@needs_mosaic
@pytest.mark.parametrize("weights", [None, 0])
@pytest.mark.parametrize("name", ["3 and 4 bits, alone", "eight tokens"])
def test_batches_lower_for_cuda(name, weights):
    """One after the other, also where each has its own weights."""
    spec = CALLS[name]
    run = functools.partial(OPERATION, implementation="mosaic_gpu", **spec.settings())
    tokens, stacks = spec.arguments()[:3], spec.arguments()[3:]
    batched = functools.partial(
        jax.tree.map, lambda a: jax.ShapeDtypeStruct((2, *a.shape), a.dtype)
    )
    arrays = *batched(tokens), *(stacks if weights is None else batched(stacks))
    axes = 0, 0, 0, weights, weights, weights
    text = lower_for_cuda(jax.vmap(run, in_axes=axes), *arrays)
    assert text.count("mosaic_gpu_v2") == 2
    assert text.count("stablehlo.while") == 2


@pytest.mark.gpu
def test_batches_on_a_gpu():
    spec = CALLS["3 and 4 bits, alone"]
    run = functools.partial(OPERATION, implementation="mosaic_gpu", **spec.settings())
    (x, ids, weights, *stacks), _ = drawn(spec)
    both = [jnp.stack([each, each[::-1]]) for each in (x, ids, weights)]
    batched = jax.jit(jax.vmap(run, in_axes=(0, 0, 0, *[None] * len(stacks))))(*both, *stacks)
    for index, found in enumerate(batched):
        np.testing.assert_array_equal(found, run(*(each[index] for each in both), *stacks))


@pytest.mark.gpu
@pytest.mark.parametrize("name", CALLS)
def test_streams_on_a_gpu(name):
    spec = CALLS[name]
    run = functools.partial(OPERATION, implementation="mosaic_gpu", **spec.settings())
    check_call(spec, run)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [8, 16, 32, 64])
def test_many_items_on_a_gpu(tokens):
    """Groups of warps must not overtake."""
    check_many_items(Spec(tokens, x="bfloat16"), WHOLE["bfloat16"])
