"""Experts of more than 64 tokens whose codes stream: which calls do, and their sum on a GPU."""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import numpy as np
import pytest

from pallas_kernels._compat import H200, lower_for_cuda
from pallas_kernels.expert_dispatch import mosaic_gpu
from pallas_kernels.expert_dispatch.api import OPERATION
from pallas_kernels.expert_dispatch.specs import Spec
from tests.pallas_kernels.expert_calls import check_call, drawn, small

needs_mosaic = pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="Mosaic GPU kernels are written for JAX 0.11 and later"
)
# Experts of several tiles, the last ones of few slots; tiles of two columns a slot, and of one.
CALLS = {
    name: dataclasses.replace(spec, x="bfloat16")
    for name, spec in {
        "3 bits": small(3, 3, tokens=65, width=1024, hidden=512),
        "groups of 128": small(3, 3, tokens=200, width=1024, hidden=512, group_size=128),
        "4 and 3 bits": small(4, 3, tokens=515, width=512, hidden=1024),
        "3 and 4 bits, alone": small(3, 4, tokens=96, width=2048, hidden=512, shared_hidden=0),
        "4 bits": small(4, 4, tokens=130, width=1024, hidden=512),
    }.items()
}


def _refusals(spec: Spec) -> str:
    return "; ".join(mosaic_gpu.refusals(H200, *spec.arguments(), **spec.settings()))


@needs_mosaic
@pytest.mark.parametrize("spec", [*CALLS.values(), Spec(65), Spec(512), Spec(1024)], ids=str)
def test_what_is_streamed(spec):
    assert not _refusals(spec)


@needs_mosaic
@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (Spec(1025), "1025 tokens"),
        (Spec(512, bits=8), "gate_up_proj has codes of 8 bits"),
        (Spec(512, group_size=32), "gate_up_proj has groups of 32"),
        (Spec(512, zero=True), "gate_up_proj has zero points"),
        (Spec(512, hidden=768), "down_proj: 2048x768 is not cut into 512 inputs"),
        (Spec(512, width=4096), "2 stages of 512x4096 need more than 232448 bytes"),
    ],
)
def test_what_is_not_streamed(spec, reason):
    assert reason in _refusals(spec)


@needs_mosaic
@pytest.mark.parametrize("name", CALLS)
def test_streams_lower_for_cuda(name):
    """Two launches of it, and of Triton three that sort and the sum; the shared expert's are less
    than tiles, so Triton's or XLA's."""
    spec = CALLS[name]
    run = functools.partial(OPERATION, implementation=None, **spec.settings())
    text = lower_for_cuda(run, *spec.arguments())
    assert text.count("mosaic_gpu_v2") == 2
    kernels = [each for each in re.findall(r'name = "(\w+)', text) if "dequant" not in each]
    sort = [f"expert_dispatch_{step}" for step in ("count", "tiles", "place")]
    assert kernels == [*sort, "expert_dispatch_sum"]


@pytest.mark.gpu
@pytest.mark.parametrize("name", CALLS)
def test_streams_on_a_gpu(name):
    spec = CALLS[name]
    run = functools.partial(OPERATION, implementation="mosaic_gpu", **spec.settings())
    check_call(spec, run)
    arrays, _ = drawn(spec)
    again = jax.jit(run)
    first = again(*arrays)
    for _ in range(50):
        np.testing.assert_array_equal(first, again(*arrays))
