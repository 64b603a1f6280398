"""Experts of more than 64 tokens whose codes stream: which calls do, and their sum on a GPU."""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import numpy as np
import pytest

from pallas_kernels._compat import H200, lower_for_cuda
from pallas_kernels.expert_dispatch import mosaic_gpu, tile_stream
from pallas_kernels.expert_dispatch.api import OPERATION
from pallas_kernels.expert_dispatch.specs import Spec
from tests.pallas_kernels.expert_calls import check_call, drawn, small

needs_mosaic = pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="Mosaic GPU kernels are written for JAX 0.11 and later"
)
# Experts of several tiles, the last ones of few slots, with most slots of a tile.
CALLS = {
    name: (dataclasses.replace(spec, x="bfloat16"), rows)
    for name, spec, rows in (
        ("3 bits", small(3, 3, tokens=65, width=1024, hidden=512), 16),
        ("groups of 128", small(3, 3, tokens=200, width=1024, hidden=512, group_size=128), 32),
        ("4 and 3 bits", small(4, 3, tokens=515, width=512, hidden=1024), 64),
        ("3 and 4, alone", small(3, 4, tokens=96, width=2048, hidden=512, shared_hidden=0), 32),
        ("4 bits", small(4, 4, tokens=130, width=1024, hidden=512), 64),
    )
}


@pytest.fixture(name="call")
def fixture_call(request, monkeypatch):
    """A call whose tiles have so many slots."""
    spec, rows = CALLS[request.param]
    monkeypatch.setattr(tile_stream, "ROWS", {rows: 0})
    return spec


def _refusals(spec: Spec) -> str:
    return "; ".join(mosaic_gpu.refusals(H200, *spec.arguments(), **spec.settings()))


@needs_mosaic
@pytest.mark.parametrize("spec", [Spec(65), Spec(512), Spec(8192), Spec(8192, bits=4)], ids=str)
def test_what_is_streamed(spec):
    assert not _refusals(spec)


@needs_mosaic
@pytest.mark.parametrize(
    ("tokens", "rows"), [(65, 16), (383, 16), (384, 32), (1023, 32), (1024, 64), (8192, 64)]
)
def test_slots_of_a_tile(tokens, rows):
    """Eight of 256 experts."""
    _, ids, _, *stacks, _ = Spec(tokens).arguments()
    assert [stream.rows for stream in tile_stream.tile_streams(*stacks, ids)] == [rows, rows]


@needs_mosaic
@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (Spec(512, bits=8), "gate_up_proj has codes of 8 bits"),
        (Spec(512, group_size=32), "gate_up_proj has groups of 32"),
        (Spec(512, zero=True), "gate_up_proj has zero points"),
        (Spec(512, hidden=640), "down_proj: 2048x640 is not cut into 256 inputs and 256 outputs"),
        (Spec(2048, width=8192), "2 stages of 512x8192 need more than 232448 bytes"),
    ],
)
def test_what_is_not_streamed(spec, reason):
    assert reason in _refusals(spec)


@needs_mosaic
@pytest.mark.parametrize("call", CALLS, indirect=True)
def test_streams_lower_for_cuda(call):
    """Two launches of it, and of Triton three that sort and the sum; the shared expert's are less
    than tiles, so Triton's or XLA's."""
    run = functools.partial(OPERATION, implementation=None, **call.settings())
    text = lower_for_cuda(run, *call.arguments())
    assert text.count("mosaic_gpu_v2") == 2
    kernels = [each for each in re.findall(r'name = "(\w+)', text) if "dequant" not in each]
    sort = [f"expert_dispatch_{step}" for step in ("count", "tiles", "place")]
    assert kernels == [*sort, "expert_dispatch_sum"]


@pytest.mark.gpu
@pytest.mark.parametrize("call", CALLS, indirect=True)
def test_streams_on_a_gpu(call):
    run = functools.partial(OPERATION, implementation="mosaic_gpu", **call.settings())
    check_call(call, run, rounded=True)
    arrays, _ = drawn(call)
    again = jax.jit(run)
    first = again(*arrays)
    for _ in range(50):
        np.testing.assert_array_equal(first, again(*arrays))
