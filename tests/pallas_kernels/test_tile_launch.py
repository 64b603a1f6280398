"""The launch of a stream past tiles of slots, whole programs in NumPy: many items each."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels._compat import H200
from pallas_kernels.dequant_matmul.layout import CENTRES, pack
from pallas_kernels.dequant_matmul.turn import Turn, part_width
from pallas_kernels.expert_dispatch.tile_launch import Plan
from pallas_kernels.expert_dispatch.tile_stream import HEIGHT, TileStream
from pallas_kernels.mosaic import memory_of
from tests.pallas_kernels.inside import Array, Recorder
from tests.pallas_kernels.memory import Memory
from tests.pallas_kernels.program import AHEAD, Program, arrays_of, put_all

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DEVICE = 0x7F0000000000
SLOTS, OF_TOKEN = 264, 3
# Of each expert. Cut by 128, there is a tile that is full, one of its half, and one of one more.
OF_EXPERT = (192, 0, 65, 5)
EXPERTS = len(OF_EXPERT)
PROGRAMS = 2
# Bits, inputs a group, inputs, slots a tile, and bits of what the results go to.
CASES = {
    "3 bits, gated": (3, 64, 512, 16, 3),
    "3 bits": (3, 64, 512, 32, None),
    "groups of 128, gated": (3, 128, 768, 64, 4),
    "4 bits, gated": (4, 128, 512, 64, 4),
    "4 bits, one stage an item": (4, 64, 256, 16, None),
    "two strips, gated": (3, 64, 512, 128, 3),
    "two strips": (3, 64, 768, 128, None),
}


@pytest.mark.parametrize("name", CASES)
def test_programs_of_many_items(name):
    rng = np.random.default_rng(0)
    bits, group, inputs, rows, below = CASES[name]
    # The last two slots have no expert.
    expert_of = rng.permutation(np.repeat(np.arange(EXPERTS), OF_EXPERT))
    order = np.argsort(expert_of, kind="stable")
    tiles = _tiles(np.sort(expert_of), rows)
    outputs = 2 * HEIGHT // (1 if below is None else 2)
    more = () if below is None else (OF_TOKEN, Turn(part_width(below)))
    stream = TileStream(bits, group, inputs, outputs, SLOTS, rows, len(tiles) + 3, *more)
    height = outputs if below is None else 2 * outputs
    codes = rng.integers(0, 2**bits, (EXPERTS, height, inputs)).astype(np.uint8)
    scales = rng.normal(size=(EXPERTS, height, inputs // group)).astype(BFLOAT16)
    count = SLOTS if below is None else SLOTS // OF_TOKEN
    x = (rng.normal(size=(count, inputs)) / inputs**0.5).astype(BFLOAT16)

    words = pack(codes, bits).reshape(EXPERTS * height, -1)
    found, there = _run(stream, x, order, tiles, words, scales, height)

    wide = np.repeat(scales.astype(np.float64), group, axis=2) * (codes - CENTRES[bits])
    wide = wide.astype(BFLOAT16).astype(np.float64)
    wanted = np.zeros((SLOTS, outputs))
    for place, slot in enumerate(order):
        given = x[place if below is None else slot // OF_TOKEN].astype(np.float64)
        made = wide[expert_of[slot]] @ given
        if below is None:
            wanted[slot] = made
        else:
            gate, above = np.split(made, 2)
            wanted[place] = gate / (1 + np.exp(-gate)) * above
    filled = order if below is None else np.arange(SLOTS - 2)
    assert there[filled].all() and there.sum() == len(filled) * outputs
    if stream.turn is not None:
        found = found[:, np.asarray(stream.turn.place_of(jnp.arange(outputs)))]
    scale = np.abs(wanted).max()
    np.testing.assert_allclose(found[filled], wanted[filled], rtol=2**-8, atol=1e-6 * scale)


def _tiles(experts: np.ndarray, rows: int) -> np.ndarray:
    """Expert, first place and number of slots of each tile."""
    found = []
    for expert in np.unique(experts):
        places = np.flatnonzero(experts == expert)
        found += [
            (expert, each[0], len(each))
            for each in np.split(places, range(rows, len(places), rows))
        ]
    return np.array(found, np.int32)


def _run(
    stream: TileStream,
    x: np.ndarray,
    order: np.ndarray,
    tiles: np.ndarray,
    words: np.ndarray,
    scales: np.ndarray,
    height: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Results of all programs, and which there are."""
    turned = Turn(part_width(stream.bits)).turned(jnp.asarray(x), 1)
    spare = np.zeros((3, 3), np.int32)
    listed = np.concatenate([tiles, spare]).T
    arrays = [
        np.asarray(turned),
        np.concatenate([order, [-1, -1]]).astype(np.int32),
        *(np.ascontiguousarray(each) for each in listed),
        np.array([len(tiles)], np.int32),
        words,
        scales.reshape(-1, stream.scale_groups),
    ]
    size = 2 * stream.slots * stream.outputs
    memory = Memory(DEVICE, sum(each.nbytes + 1024 for each in arrays) + size)
    refs, address = put_all(memory, DEVICE, arrays)
    refs.append(Array(np.uint64(address)))
    for number in range(PROGRAMS):
        _program(stream, height, refs, memory, number)
    found, there = memory.stored_from(address, BFLOAT16, (stream.slots, stream.outputs))
    return found.astype(np.float64), there


def _program(
    stream: TileStream, height: int, refs: list[Array], memory: Memory, number: int
) -> None:
    """One of them."""
    target = dataclasses.replace(H200, cores=PROGRAMS)
    plan = Plan(stream, target, height)
    shared, end = arrays_of(plan.shared)
    begin = int(shared[0].address)
    assert end - begin == memory_of(stream.shared(plan.stages, PROGRAMS)) <= target.shared_memory
    inside = Recorder()
    plan.kernel(inside, *refs, *shared)
    Program(inside.body, number, stream.threads, memory, Memory(0, end), AHEAD[number])
