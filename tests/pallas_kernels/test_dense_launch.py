"""The launch of a stream of codes past rows that stay, whole programs in NumPy: many tiles each."""

from __future__ import annotations

import math

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels._compat import H200
from pallas_kernels.dequant_matmul.layout import CENTRES, pack
from pallas_kernels.dequant_matmul.stream import Stream
from pallas_kernels.dequant_matmul.stream_launch import Plan
from tests.pallas_kernels.inside import Array, Recorder
from tests.pallas_kernels.memory import Memory
from tests.pallas_kernels.program import AHEAD, Program, arrays_of, put_all

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DEVICE = 0x7F0000000000
CORES = 4
OUTPUTS = 192, 64, 320
STREAMS = [
    Stream(bits, group, rows, inputs, OUTPUTS, splits, line)
    for bits, group, rows, inputs, splits, line in (
        (4, 64, 5, 2048, 1, 64),
        (3, 128, 33, 1024, 2, 64),
        (8, 32, 17, 1024, 2, 64),
        (4, 128, 64, 1024, 1, 128),
    )
]


@pytest.mark.parametrize("stream", STREAMS, ids=str)
def test_programs_of_many_tiles(stream):
    rng = np.random.default_rng(0)
    codes = [
        rng.integers(0, 2**stream.bits, (outputs, stream.inputs)).astype(np.uint8)
        for outputs in OUTPUTS
    ]
    scales = [
        rng.normal(size=(outputs, stream.scale_groups)).astype(BFLOAT16) for outputs in OUTPUTS
    ]
    x = (rng.normal(size=(stream.rows, stream.inputs)) / stream.inputs**0.5).astype(BFLOAT16)
    words = [pack(each, stream.bits).reshape(len(each), -1) for each in codes]
    for found, each, own in zip(_run(stream, x, words, scales), codes, scales, strict=True):
        wide = np.repeat(own.astype(np.float64), stream.group_size, axis=1)
        wanted = x.astype(np.float64) @ (wide * (each - CENTRES[stream.bits])).T
        scale = np.abs(wanted).max()
        np.testing.assert_allclose(found.sum(0), wanted, rtol=2**-8, atol=1e-5 * scale)


def _run(
    stream: Stream, x: np.ndarray, words: list[np.ndarray], scales: list[np.ndarray]
) -> list[np.ndarray]:
    """Results of all programs, by part of the inputs."""
    plan = Plan(stream, stream.stages(H200.shared_memory), CORES, jnp.bfloat16)
    assert 1 < plan.programs <= CORES
    arrays = [x, *words, *scales]
    results = [math.prod(each.shape) * each.dtype.itemsize for each in plan.out]
    size = sum(each.nbytes for each in arrays) + sum(results) + 1024 * (len(arrays) + len(results))
    memory = Memory(DEVICE, size)
    refs, address = put_all(memory, DEVICE, arrays)
    for size in results:
        refs.append(Array(np.uint64(address)))
        address += -(-size // 1024) * 1024
    shared, end = arrays_of(plan.shared)
    assert end <= H200.shared_memory
    for number in range(plan.programs):
        own = Memory(0, end)
        # What belongs to rows that are not there may be anything.
        own.put(int(shared[1].address), np.full(stream.held, 0xFF, np.uint8))
        inside = Recorder()
        plan.kernel(inside, *refs, *shared)
        Program(inside.body, number, stream.threads, memory, own, AHEAD[number % len(AHEAD)])
    found = []
    for out, ref in zip(plan.out, refs[len(arrays) :], strict=True):
        result, there = memory.stored_from(int(ref.address), np.dtype(out.dtype), out.shape)
        assert there.all()
        found.append(result.astype(np.float64))
    return found
