"""Experts of more than 64 tokens whose codes stream: which calls do, and their sum on a GPU."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

import jax
import numpy as np
import pytest

from pallas_kernels._compat import H200, lower_for_cuda, targeting
from pallas_kernels.expert_dispatch import mosaic_gpu, tile_stream
from pallas_kernels.expert_dispatch.api import OPERATION
from pallas_kernels.expert_dispatch.specs import Spec
from pallas_kernels.expert_dispatch.tile_stream import TileStream, tile_streams
from tests.pallas_kernels.expert_calls import ROUNDED, check_call, check_many_items, drawn, small

needs_mosaic = pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="Mosaic GPU kernels are written for JAX 0.11 and later"
)
LONG = small(4, 3, tokens=515, width=512, hidden=512, group_size=128, shared_hidden=0)
# Experts of several tiles, the last ones of few slots, with most slots of a tile.
CALLS = {
    name: (dataclasses.replace(spec, x="bfloat16"), rows)
    for name, spec, rows in (
        ("3 bits", small(3, 3, tokens=65, width=1024, hidden=512), 16),
        ("groups of 128", small(3, 3, tokens=200, width=1024, hidden=512, group_size=128), 32),
        ("4 and 3 bits", small(4, 3, tokens=515, width=512, hidden=1024), 64),
        ("3 and 4, alone", small(3, 4, tokens=96, width=2048, hidden=512, shared_hidden=0), 32),
        ("4 bits", small(4, 4, tokens=130, width=1024, hidden=512), 64),
        ("two strips", small(3, 3, tokens=200, width=1024, hidden=512), 128),
        ("two strips, alone", LONG, 128),
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
@pytest.mark.parametrize("call", CALLS, indirect=True)
def test_small_calls_are_streamed(call):
    assert not _refusals(call)


def _streams(*arrays: Any) -> tuple[TileStream, TileStream]:
    return tile_streams(*arrays, H200.shared_memory, H200.cores)


@needs_mosaic
@pytest.mark.parametrize(("width", "rows"), [(2048, 64), (7168, 32), (8192, 16)])
def test_tiles_have_as_many_slots_as_there_is_memory_for(width, rows):
    spec = Spec(2048, width=width, hidden=2048, bits=4 if width == 8192 else 3)
    assert not _refusals(spec)
    _, ids, _, *stacks, _ = spec.arguments()
    assert [each.rows for each in _streams(*stacks, ids)] == [rows, rows]


@needs_mosaic
@pytest.mark.parametrize(
    "spec",
    [Spec(8192), Spec(2048, experts=128, hidden=768), Spec(49152), Spec(8192, experts=512)],
    ids=str,
)
def test_long_prompts_of_released_shapes_have_the_largest_tiles(spec):
    """Whose shared memory is nearly full: 2 % of it are not."""
    _, ids, _, *stacks, _ = spec.arguments()
    assert [each.rows for each in _streams(*stacks, ids)] == [128, 128]


@needs_mosaic
@pytest.mark.parametrize(
    ("tokens", "rows"),
    [(65, 16), (383, 16), (384, 32), (1023, 32), (1024, 64), (4095, 64), (4096, 128), (8192, 128)],
)
def test_slots_of_a_tile(tokens, rows):
    """Eight of 256 experts."""
    _, ids, _, *stacks, _ = Spec(tokens).arguments()
    assert [each.rows for each in _streams(*stacks, ids)] == [rows, rows]


@needs_mosaic
@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (Spec(512, bits=8), "gate_up_proj has codes of 8 bits"),
        (Spec(512, group_size=32), "gate_up_proj has groups of 32"),
        (Spec(512, zero=True), "gate_up_proj has zero points"),
        (Spec(512, hidden=640), "down_proj: 2048x640 is not cut into 256 inputs and 256 outputs"),
        (Spec(2048, width=16384), "2 stages of 512x16384 need more than 232448 bytes"),
    ],
)
def test_what_is_not_streamed(spec, reason):
    assert reason in _refusals(spec)


@needs_mosaic
@pytest.mark.parametrize("call", CALLS, indirect=True)
def test_streams_lower_for_cuda(call):
    """Two launches of it, and of Triton three that sort, tokens' order and the sum; the shared
    expert's are less than tiles, so Triton's or XLA's."""
    run = functools.partial(OPERATION, implementation=None, **call.settings())
    text = lower_for_cuda(run, *call.arguments())
    assert text.count("mosaic_gpu_v2") == 2
    kernels = [each for each in re.findall(r'name = "(\w+)', text) if "dequant" not in each]
    steps = ("count", "tiles", "place", "inputs", "sum")
    assert kernels == [f"expert_dispatch_{step}" for step in steps]


@pytest.mark.gpu
@pytest.mark.parametrize("cores", [H200.cores, 3])
@pytest.mark.parametrize("call", CALLS, indirect=True)
def test_streams_on_a_gpu(call, cores):
    """By few programs, each has many more items than stages."""
    run = functools.partial(OPERATION, implementation="mosaic_gpu", **call.settings())
    with targeting(dataclasses.replace(H200, cores=cores)):
        check_call(call, run, rounded=True)
        arrays, _ = drawn(call)
        again = jax.jit(run)
        first = again(*arrays)
        for _ in range(50):
            np.testing.assert_array_equal(first, again(*arrays))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [65, 512, 2048, 4096])
def test_many_items_on_a_gpu(tokens):
    check_many_items(Spec(tokens, x="bfloat16"), ROUNDED)
