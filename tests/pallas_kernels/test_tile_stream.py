"""What warps do with tiles of slots and stages of codes, instruction by instruction in NumPy."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from pallas_kernels._compat import H200
from pallas_kernels.dequant_matmul.layout import CENTRES, pack
from pallas_kernels.dequant_matmul.tensor_cores import BLOCK, TILE
from pallas_kernels.expert_dispatch.tile_assembly import finish, list_tiles, multiply, sums_of
from pallas_kernels.expert_dispatch.tile_inputs import spread
from pallas_kernels.expert_dispatch.tile_stream import ENTRY, GROUPS, ROWS, TileStream
from tests.pallas_kernels.memory import Memory
from tests.pallas_kernels.streams import put_box, run_text

INPUTS, SLOTS, RESULTS = 0x7F0000000000, 0x7F0001000000, 0x7F0002000000
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
PROGRAMS, SLOTS_OF_TOKEN, TOKENS, TILES, ITEMS = 4, 3, 40, 11, 3
STREAMS = [
    TileStream(
        bits,
        group,
        inputs,
        ITEMS * (64 if gated else 128),
        gated,
        TOKENS * SLOTS_OF_TOKEN,
        SLOTS_OF_TOKEN,
        TILES,
        line,
    )
    for bits, group, inputs, gated, line in (
        (3, 64, 1024, True, 64),
        (3, 64, 512, False, 64),
        (3, 64, 2048, True, 64),
        (3, 128, 1024, True, 128),
        (4, 32, 1024, False, 64),
        (4, 64, 1024, True, 128),
        (4, 128, 2048, False, 128),
    )
]


@pytest.mark.parametrize("filled", [ROWS, 5, 1])
@pytest.mark.parametrize("stream", STREAMS, ids=str)
def test_an_item(stream, filled):
    """The second tile that a program has, behind one that is full."""
    rng = np.random.default_rng(filled)
    rows = 2 * stream.outputs if stream.gated else stream.outputs
    codes = rng.integers(0, 2**stream.bits, (rows, stream.inputs)).astype(np.uint8)
    scales = rng.normal(size=(rows, stream.scale_groups)).astype(BFLOAT16)
    count = TOKENS if stream.gated else stream.slots
    x = (rng.normal(size=(count, stream.inputs)) / stream.inputs**0.5).astype(BFLOAT16)
    words, slot = pack(codes, stream.bits), rng.permutation(stream.slots).astype(np.int32)
    assert not stream.oddities(H200.shared_memory, PROGRAMS)
    held, stage = 1024, 1024 + stream.held + 384
    numbers = stage + -(-stream.stage.size // 1024) * 1024
    own_slots = numbers + stream.scales
    shared = Memory(0, own_slots + 4 * ROWS + 1024)
    shared.put(held, np.full(stream.held, 0xFF, np.uint8))
    memory = Memory(INPUTS, RESULTS - INPUTS + stream.slots * stream.outputs * 2)
    memory.put(INPUTS, x)
    memory.put(SLOTS, slot)

    def run(text: str, operands: list, results: int = 0) -> list[np.ndarray]:
        made, conflicts = run_text(text, operands, shared, memory, stream.consumers, results)
        # Scales of a row lie side by side, and two columns of a slot in each other's banks.
        allowed = {f"ld.shared.{ {1: 'u16', 2: 'b32', 4: 'v2.b32'}[BLOCK // stream.group_size] }"}
        if stream.copies == 2:
            allowed.add("st.shared.b32")
        assert not conflicts - allowed, conflicts
        return made

    _clear(stream, shared, memory, held)
    first = 0
    for first, rows_here in ((0, ROWS), (ROWS + 3, filled)):
        at = np.uint64(SLOTS + 4 * first)
        run(spread(stream), [np.uint64(INPUTS), at, first, rows_here, held, own_slots])
    item = stream.item * (ITEMS - 1)
    parts = [slice(item, item + stream.item)]
    if stream.gated:
        parts.append(slice(stream.outputs + item, stream.outputs + item + stream.item))
    mine = np.concatenate([np.arange(rows)[part] for part in parts])
    assert len(mine) == GROUPS * TILE
    shared.put(numbers, scales[mine])
    totals = [np.zeros(stream.consumers, np.uint32)] * sums_of(stream)
    for chunk in range(stream.chunks):
        units = stream.stage.line // 4
        for word in range(stream.bits):
            piece = np.ascontiguousarray(words[mine, word, chunk * units : (chunk + 1) * units])
            box = stage + stream.stage.slot(word) * stream.stage.box
            put_box(shared, box, piece, stream.stage.line)
        inputs = held + chunk * stream.stage.inputs * stream.own_rows * 2
        given = [inputs, stage, numbers + chunk * stream.stage.inputs // stream.group_size * 2]
        totals = run(multiply(stream), [*given, *totals], sums_of(stream))
    run(finish(stream), [item, first, filled, own_slots, np.uint64(RESULTS), *totals])

    found, there = memory.stored_from(RESULTS, BFLOAT16, (stream.slots, stream.outputs))
    chosen = slot[first : first + filled]
    given = x[chosen // SLOTS_OF_TOKEN] if stream.gated else x[first : first + filled]
    to = np.arange(first, first + filled) if stream.gated else chosen
    wide = np.repeat(scales.astype(np.float64), stream.group_size, axis=1)
    matrix = (wide * (codes - CENTRES[stream.bits]))[mine]
    wanted = given.astype(np.float64) @ matrix.T
    if stream.gated:
        gate, up = np.split(wanted, 2, axis=1)
        wanted = gate / (1 + np.exp(-gate)) * up
    places = np.zeros_like(there)
    places[to, item : item + stream.item] = True
    np.testing.assert_array_equal(there, places)
    scale = np.abs(wanted).max()
    np.testing.assert_allclose(
        found[to, item : item + stream.item].astype(np.float64),
        wanted,
        rtol=2**-8,
        atol=1e-6 * scale,
    )


def _clear(stream: TileStream, shared: Memory, memory: Memory, held: int) -> None:
    """As `list_tiles` does, whose list lies elsewhere here."""
    del memory
    if stream.copies == 2:
        shared.put(held, np.zeros(stream.held, np.uint8))


def test_tiles_of_a_program():
    stream = STREAMS[0]
    rng = np.random.default_rng(0)
    arrays = [rng.integers(0, 100, stream.tiles).astype(np.int32) for _ in range(3)]
    addresses = [INPUTS + 4096 * index for index in range(3)]
    memory = Memory(INPUTS, 4 * 4096)
    for address, array in zip(addresses, arrays, strict=True):
        memory.put(address, array)
    listed = 1024
    held = listed + 1024
    for first in (0, 3, stream.tiles - 2):
        shared = Memory(0, held + stream.held)
        operands = [first, *map(np.uint64, addresses), listed, held]
        run_text(list_tiles(stream, PROGRAMS), operands, shared, memory, stream.threads, 0)
        shape = stream.listed(PROGRAMS), ENTRY // 4
        found, there = shared.stored_from(listed, np.dtype(np.int32), shape)
        assert there.all()
        wanted = np.zeros(shape, np.int32)
        filled = slice(first, first + shape[0])
        for index, array in enumerate(arrays):
            wanted[: len(array[filled]), index] = array[filled]
        np.testing.assert_array_equal(found, wanted)
        zeros, there = shared.stored_from(held, np.dtype(np.uint8), (stream.held,))
        assert there.all() and not zeros.any()
