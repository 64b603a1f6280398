"""What groups of warps do with a tile in shared memory, instruction by instruction in NumPy.

Shared memory holds what the copies of `stream_launch` leave there, and nothing else can be read.
"""

from __future__ import annotations

import dataclasses
import itertools

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels._compat import H200
from pallas_kernels.dequant_matmul.layout import CENTRES, pack
from pallas_kernels.expert_dispatch.stream import (
    GATES,
    GROUP_SIZES,
    OUTPUTS,
    ROWS,
    TURN,
    Cut,
    Stream,
)
from pallas_kernels.expert_dispatch.stream_assembly import multiply
from tests.pallas_kernels.memory import Memory
from tests.pallas_kernels.ptx import WARP, Threads

TILES, SLOTS = 5, 7
# Addresses of 64 bits; all that is shared begins at a multiple of 1,024, with a gap before it.
SLOTS_OF_ROW, RESULTS = 0x7F0000000040, 0x7F0000001000
# Of the first group of warps, and of the second; further ones begin anew.
ROWS_OF_SLOTS = (5, 0, 6, 2), (3, SLOTS, 1, SLOTS)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def _stream(cut: Cut, bits: int, group_size: int, inputs: int) -> Stream:
    gated = cut in GATES
    stream = Stream(bits, group_size, inputs, 0, gated, SLOTS, 1, cut)
    return dataclasses.replace(stream, outputs=TILES * stream.tile)


# Lines of 32, 64 and 128 bytes, and then more of them than one.
INPUTS = (256, 512, 1024, 768, 1536, 2048)
CODES = tuple(itertools.product((3, 4), GROUP_SIZES))
ALL = [
    _stream(cut, *CODES[which % len(CODES)], inputs)
    for cut in (*GATES, *OUTPUTS)
    for which, inputs in [
        *itertools.product(range(len(CODES)), INPUTS[:3]),
        *enumerate(INPUTS[3:]),
    ]
]
STREAMS = [stream for stream in ALL if not stream.oddities(H200.shared_memory)]


def _name(stream: Stream) -> str:
    cut = stream.cut
    kind = "gates" if stream.gated else "outputs"
    warps = f"{cut.bands}x{cut.parts}x{cut.groups}"
    return f"{kind}-{warps}-{stream.inputs}-{stream.bits}-{stream.group_size}"


@dataclasses.dataclass
class _Case:
    """Random arguments of a launch, of one expert.

    Attributes:
        words: of the matrix: uint32 [R Q*U].
        scales: bfloat16 [R J].
        x: of slots, as they are: bfloat16 [R I].
        wanted: products: float64 [R, rows of the matrix].
    """

    words: np.ndarray
    scales: np.ndarray
    x: np.ndarray
    wanted: np.ndarray

    @classmethod
    def of(cls, stream: Stream, seed: int) -> _Case:
        rng = np.random.default_rng(seed)
        rows = stream.outputs * (2 if stream.gated else 1)
        codes = rng.integers(0, 2**stream.bits, (rows, stream.inputs)).astype(np.uint8)
        scales = rng.normal(size=(rows, stream.groups)).astype(BFLOAT16)
        x = (rng.normal(size=(ROWS, stream.inputs)) / stream.inputs**0.5).astype(BFLOAT16)
        wide = np.repeat(scales.astype(np.float64), stream.group_size, axis=1)
        matrix = wide * (codes - CENTRES[stream.bits])
        words = pack(codes, stream.bits).reshape(rows, -1)
        return cls(words, scales, x, x.astype(np.float64) @ matrix.T)


def _swizzled(address: np.ndarray, line: int) -> np.ndarray:
    """Where the copy engine brings what would be at an address."""
    return address ^ (address >> 7 & line // 16 - 1) << 4


def _put_box(shared: Memory, address: int, words: np.ndarray, line: int) -> None:
    """A box of a matrix: lines one behind the other, pieces of 16 bytes swizzled."""
    pieces = words.reshape(-1, 4)
    places = _swizzled(address + 16 * np.arange(len(pieces)), line)
    moved = np.empty_like(pieces)
    moved[(places - address) // 16] = pieces
    shared.put(address, moved)


def _put_tile(shared: Memory, codes: int, scales: int, stream: Stream, case: _Case, tile: int):
    """Its codes and scales; those of gates, then those of the rows above."""
    first, words = tile * stream.tile, stream.line // 4
    starts = (first, stream.outputs + first) if stream.gated else (first,)
    count = stream.rows // len(starts)
    for half, start in enumerate(starts):
        rows = slice(start, start + count)
        for box in range(stream.bits * stream.boxes):
            columns = np.ascontiguousarray(case.words[rows, box * words : (box + 1) * words])
            to = codes + box * stream.box + half * count * stream.line
            _put_box(shared, to, columns, stream.line)
        shared.put(scales + half * count * stream.groups * 2, case.scales[rows])


def _turned(x: np.ndarray) -> np.ndarray:
    found = np.empty_like(x)
    found[:, np.asarray(TURN.place_of(jnp.arange(x.shape[1])))] = x
    return found


def _run(stream: Stream, case: _Case, slots: tuple[int, ...], tile: int, group: int):
    """What a group's threads store, and where: arrays [S O]."""
    sizes = {
        "inputs": ROWS * stream.token,
        "codes": stream.codes,
        "scales": stream.scales,
        "sums": stream.sums // (2 * stream.cut.groups),
        "zeros": stream.zeros,
        "barrier": 8,
    }
    places, end = {}, 1024
    for name, size in sizes.items():
        places[name] = end
        end += (size // 1024 + 2) * 1024
    shared = Memory(0, end)
    # Where slots are missing lies anything: here no numbers.
    x = np.where(np.asarray(slots)[:, None] < SLOTS, _turned(case.x), BFLOAT16.type(np.nan))
    shared.put(places["inputs"], x)
    shared.put(places["zeros"], np.zeros(stream.zeros, np.uint8))
    _put_tile(shared, places["codes"], places["scales"], stream, case, tile)

    dtype = BFLOAT16 if stream.gated else np.dtype(np.float32)
    size = SLOTS * stream.outputs * dtype.itemsize
    memory = Memory(SLOTS_OF_ROW, RESULTS - SLOTS_OF_ROW + size)
    memory.put(SLOTS_OF_ROW, np.asarray(slots, np.int32))
    cut = stream.cut
    warps = cut.bands * cut.parts
    operands = [places[name] for name in ("inputs", "codes", "scales", "sums", "zeros")]
    operands += [np.uint64(SLOTS_OF_ROW), tile * stream.tile, np.uint64(RESULTS), places["barrier"]]
    threads = Threads(
        np.arange(WARP * warps) + WARP * warps * group,
        operands,
        memory=memory,
        shared=shared,
        given_back=[(places[name], sizes[name]) for name in ("codes", "scales")],
    ).run(multiply(stream))
    assert threads.arrivals == {places["barrier"]: warps}
    return memory.stored_from(RESULTS, dtype, (SLOTS, stream.outputs))


@pytest.mark.parametrize("stream", STREAMS, ids=_name)
def test_products_of_a_tile(stream):
    case = _Case.of(stream, STREAMS.index(stream))
    gates, above = case.wanted[:, : stream.outputs], case.wanted[:, stream.outputs :]
    wanted = gates / (1 + np.exp(-gates)) * above if stream.gated else gates
    columns = np.arange(stream.tile) + TILES // 2 * stream.tile
    stored_at = np.asarray(TURN.place_of(jnp.asarray(columns))) if stream.gated else columns
    # Gates are rounded to bfloat16.
    share = 2**-8 if stream.gated else 0
    for group in range(stream.cut.groups):
        slots = ROWS_OF_SLOTS[group % 2]
        found, there = _run(stream, case, slots, TILES // 2, group)
        places = np.zeros_like(there)
        for index, slot in enumerate(slots):
            if slot < SLOTS:
                places[slot, stored_at] = True
                own = found[slot, stored_at].astype(np.float64)
                np.testing.assert_allclose(own, wanted[index, columns], rtol=share, atol=1e-5)
        np.testing.assert_array_equal(there, places)


def test_lines_of_all_sizes_are_tested():
    assert {(stream.line, stream.gated) for stream in STREAMS} == {
        (line, gated) for line in (32, 64, 128) for gated in (False, True)
    }
    assert {stream.cut for stream in STREAMS} == {*GATES, *OUTPUTS}
