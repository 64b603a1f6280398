"""What all warps do with chunks of codes in shared memory, instruction by instruction in NumPy."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from pallas_kernels._compat import H200
from pallas_kernels.dequant_matmul.layout import CENTRES, pack
from pallas_kernels.dequant_matmul.stream import GROUP_SIZES, Stream
from pallas_kernels.dequant_matmul.stream_assembly import finish, multiply, sums_of
from pallas_kernels.dequant_matmul.stream_inputs import spread
from pallas_kernels.dequant_matmul.tensor_cores import BLOCK, TILE
from tests.pallas_kernels.memory import Memory
from tests.pallas_kernels.streams import put_box, run_text

INPUTS, RESULTS = 0x7F0000000000, 0x7F0001000000
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
TILES = 3
STREAMS = [
    Stream(bits, group, rows, inputs, (), splits, line)
    for bits, group, rows, inputs, splits, line in (
        (4, 64, 5, 1024, 1, 128),
        (4, 32, 32, 2048, 1, 64),
        (4, 128, 17, 2048, 2, 128),
        (4, 64, 33, 1024, 2, 64),
        (4, 32, 64, 1024, 1, 128),
        (3, 128, 16, 1024, 1, 128),
        (3, 128, 50, 2048, 2, 64),
        (8, 64, 8, 1024, 1, 128),
        (8, 128, 24, 512, 1, 64),
        (8, 32, 9, 2048, 2, 64),
    )
]


def _run(
    stream: Stream, text: str, operands: list, shared: Memory, memory: Memory, results: int = 0
):
    made, conflicts, *_ = run_text(text, operands, shared, memory, stream.consumers, results)
    # Scales of a row lie side by side, and so in the same banks as those of other rows.
    scales = {1: "u16", 2: "b32", 4: "v2.b32"}[BLOCK // stream.group_size]
    assert not conflicts - {f"ld.shared.{scales}"}, conflicts
    return made


@pytest.mark.parametrize("size", [4, 2])
@pytest.mark.parametrize("stream", STREAMS, ids=str)
def test_products_of_a_tile(stream, size):
    rng = np.random.default_rng(0)
    outputs = TILES * TILE
    codes = rng.integers(0, 2**stream.bits, (outputs, stream.inputs)).astype(np.uint8)
    scales = rng.normal(size=(outputs, stream.scale_groups)).astype(BFLOAT16)
    x = (rng.normal(size=(stream.rows, stream.inputs)) / stream.inputs**0.5).astype(BFLOAT16)
    words = pack(codes, stream.bits)
    assert stream.fits(H200.cores, H200.shared_memory)
    split, tile, first_row = stream.splits - 1, 1, (stream.row_parts - 1) * stream.own_rows
    held, stage = 1024, 1024 + -(-stream.held // 1024) * 1024
    # Not where the order of pieces begins.
    stage += 384
    numbers = stage + -(-stream.stage.size // 1024) * 1024
    sums = numbers + -(-stream.scales // 1024) * 1024
    shared = Memory(0, sums + stream.sums + 1024)
    # What belongs to rows that are not there may be anything.
    shared.put(held, np.full(stream.held, 0xFF, np.uint8))
    dtype = BFLOAT16 if size == 2 else np.dtype(np.float32)
    memory = Memory(INPUTS, RESULTS - INPUTS + stream.rows * outputs * size)
    memory.put(INPUTS, x)
    first = np.uint64(INPUTS + split * stream.own * 2)
    _run(stream, spread(stream), [first, first_row, held], shared, memory)

    rows = slice(tile * TILE, (tile + 1) * TILE)
    shared.put(numbers, scales[rows])
    own = numbers + split * stream.scale_groups // stream.splits * 2
    totals = [np.zeros(stream.consumers, np.uint32)] * sums_of(stream)
    for chunk in range(stream.chunks):
        units = stream.line // 4
        at = split * stream.own // 32 + chunk * units
        for word in range(stream.bits):
            piece = np.ascontiguousarray(words[rows, word, at : at + units])
            put_box(shared, stage + stream.stage.slot(word) * stream.stage.box, piece, stream.line)
        inputs = held + chunk * stream.stage.inputs * stream.own_rows * 2
        mine = own + chunk * stream.stage.inputs // stream.group_size * 2
        given = [inputs, stage, mine, *totals]
        totals = _run(stream, multiply(stream), given, shared, memory, sums_of(stream))
    given = [sums, tile * TILE, first_row, np.uint64(RESULTS), outputs, *totals]
    _run(stream, finish(stream, size), given, shared, memory)

    found, there = memory.stored_from(RESULTS, dtype, (stream.rows, outputs))
    places = np.zeros_like(there)
    places[first_row : first_row + stream.own_rows, rows] = True
    np.testing.assert_array_equal(there, places)
    wide = np.repeat(scales.astype(np.float64), stream.group_size, axis=1)
    matrix = wide * (codes - CENTRES[stream.bits])
    mine = slice(split * stream.own, (split + 1) * stream.own)
    wanted = x[first_row:, mine].astype(np.float64) @ matrix[rows, mine].T
    share = 2**-8 if size == 2 else 0
    scale = np.abs(wanted).max()
    np.testing.assert_allclose(
        found[first_row:, rows].astype(np.float64), wanted, rtol=share, atol=1e-6 * scale
    )


@pytest.mark.parametrize("rows", [8, 16, 24, 32])
@pytest.mark.parametrize("bits", GROUP_SIZES)
def test_tensor_cores_leave_registers(bits, rows):
    """With less than a third of them left, the compiler waits for each instruction by itself."""
    for group in GROUP_SIZES[bits]:
        stream = Stream(bits, group, rows, 2048, ())
        # Totals, and twice sums of a span and its pairs for two outputs by four threads.
        own = 4 * stream.columns + 2 * (4 * stream.columns + stream.span // 4)
        assert own <= 65536 // stream.threads // 8 * 8 * 2 // 3
