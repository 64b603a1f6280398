"""What warps do with tiles of slots and stages of codes, instruction by instruction in NumPy."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels._compat import H200
from pallas_kernels.dequant_matmul.layout import CENTRES, pack
from pallas_kernels.dequant_matmul.turn import Turn
from pallas_kernels.expert_dispatch.tile_assembly import list_items, multiply
from pallas_kernels.expert_dispatch.tile_inputs import ask
from pallas_kernels.expert_dispatch.tile_results import store_by_slot, store_gated
from pallas_kernels.expert_dispatch.tile_stream import ENTRY, HEIGHT, TileStream
from tests.pallas_kernels.memory import Memory
from tests.pallas_kernels.streams import put_box, run_text

INPUTS, SLOTS, RESULTS = 0x7F0000000000, 0x7F0001000000, 0x7F0002000000
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
NUMBERS, TURNED = 1024, 2048
PROGRAMS, SLOTS_OF_TOKEN, TOKENS, TILES, ITEMS = 4, 3, 48, 11, 3
# Orders of what threads of four take: a unit each at 3 bits, else a word of each unit.
OF_UNITS, OF_WORDS = Turn(32), Turn(8)
STREAMS = [
    TileStream(
        bits,
        group,
        inputs,
        ITEMS * HEIGHT // (2 if turn else 1),
        TOKENS * SLOTS_OF_TOKEN,
        rows,
        TILES,
        SLOTS_OF_TOKEN if turn else None,
        turn,
    )
    for bits, group, inputs, rows, turn in (
        (3, 64, 512, 16, OF_UNITS),
        (3, 64, 512, 32, None),
        (3, 64, 512, 64, OF_WORDS),
        (3, 128, 256, 64, None),
        (4, 64, 512, 16, OF_UNITS),
        (4, 64, 256, 64, None),
        (4, 128, 512, 32, OF_WORDS),
        (3, 64, 256, 128, OF_UNITS),
        (3, 128, 256, 128, None),
        (4, 128, 256, 128, OF_WORDS),
    )
]


FILLED = [(each, filled) for each in STREAMS for filled in (each.rows, 5)]
FILLED += [(each, 1) for each in STREAMS[:2]]
# About the half of a tile, of which alone there may be products.
FILLED += [(each, filled) for each in STREAMS if each.rows == 128 for filled in (64, 65)]


@pytest.mark.parametrize(("stream", "filled"), FILLED, ids=str)
def test_an_item(stream, filled):
    rng = np.random.default_rng(1)
    rows = 2 * stream.outputs if stream.gated else stream.outputs
    codes = rng.integers(0, 2**stream.bits, (rows, stream.inputs)).astype(np.uint8)
    scales = rng.normal(size=(rows, stream.scale_groups)).astype(BFLOAT16)
    count = TOKENS if stream.gated else stream.slots
    x = (rng.normal(size=(count, stream.inputs)) / stream.inputs**0.5).astype(BFLOAT16)
    slot = rng.permutation(stream.slots).astype(np.int32)
    assert not stream.oddities(H200.shared_memory, PROGRAMS)
    first, item = stream.slots - filled - 3, stream.item * (ITEMS - 1)
    parts = [slice(item, item + stream.item)]
    if stream.gated:
        parts.append(slice(stream.outputs + item, stream.outputs + item + stream.item))
    mine = np.concatenate([np.arange(rows)[part] for part in parts])
    assert len(mine) == HEIGHT
    memory = Memory(INPUTS, RESULTS - INPUTS + stream.slots * stream.outputs * 2)
    order = OF_UNITS if stream.bits == 3 else OF_WORDS
    memory.put(INPUTS, np.asarray(order.turned(jnp.asarray(x), 1)))
    memory.put(SLOTS, slot)
    size = next(each for each in stream.sizes if each >= filled)
    words = pack(codes, stream.bits)[mine]
    totals = _totals(stream, size, memory, words, scales[mine], (first, filled))
    if stream.gated:
        text, given = store_gated(stream, size), [first, filled]
    else:
        text, given = store_by_slot(stream, size), [filled, NUMBERS]
    operands = [item, *given, TURNED, np.uint64(RESULTS), *totals]
    shared = Memory(0, TURNED + stream.turned)
    shared.put(NUMBERS, slot[first + np.minimum(np.arange(stream.rows), filled - 1)])
    # Twice, since each item finds in shared memory what the one before left.
    for _ in range(2):
        ran = run_text(text, operands, shared, memory, stream.consumers, 0)
        assert not ran.conflicts - {"st.shared.b16"}

    found, there = memory.stored_from(RESULTS, BFLOAT16, (stream.slots, stream.outputs))
    chosen = slot[first : first + filled]
    given = x[chosen // SLOTS_OF_TOKEN] if stream.gated else x[first : first + filled]
    to = np.arange(first, first + filled) if stream.gated else chosen
    wide = np.repeat(scales.astype(np.float64), stream.group_size, axis=1)
    matrix = (wide * (codes - CENTRES[stream.bits])).astype(BFLOAT16)[mine]
    wanted = given.astype(np.float64) @ matrix.astype(np.float64).T
    if stream.gated:
        gate, up = np.split(wanted, 2, axis=1)
        wanted = gate / (1 + np.exp(-gate)) * up
    columns = np.arange(item, item + stream.item)
    if stream.turn is not None:
        columns = np.asarray(stream.turn.place_of(jnp.asarray(columns)))
    places = np.zeros_like(there)
    places[np.ix_(to, columns)] = True
    np.testing.assert_array_equal(there, places)
    scale = np.abs(wanted).max()
    np.testing.assert_allclose(
        found[np.ix_(to, columns)].astype(np.float64), wanted, rtol=2**-8, atol=1e-6 * scale
    )


def _totals(
    stream: TileStream,
    size: int,
    memory: Memory,
    words: np.ndarray,
    scales: np.ndarray,
    tile: tuple[int, int],
) -> list[np.ndarray]:
    """All threads' sums of an item, stage by stage.

    Args:
        stream: see there.
        size: slots that are multiplied.
        memory: inputs and slots.
        words: codes of the item's rows.
        scales: of them.
        tile: first place, and how many slots.
    """
    held, stage = 2048, 2048 + stream.held
    numbers = stage + -(-stream.stage.size // 1024) * 1024
    totals = [np.zeros(stream.consumers, np.uint32)] * stream.sums(size)
    threads = np.arange(stream.consumers, stream.threads)
    barrier = 8
    for chunk in range(stream.chunks):
        shared = Memory(0, numbers + stream.scales)
        shared.put(numbers, scales)
        units = stream.stage.line // 4
        for word in range(stream.bits):
            piece = np.ascontiguousarray(words[:, word, chunk * units : (chunk + 1) * units])
            box = stage + stream.stage.slot(word) * stream.stage.box
            put_box(shared, box, piece, stream.stage.line)
        before = chunk * stream.stage.inputs * 2
        at = numbers + chunk * stream.stage.inputs // stream.group_size * 2
        for block in range(stream.stage.blocks):
            given = [np.uint64(INPUTS), np.uint64(SLOTS), *tile, before, held, NUMBERS, barrier]
            ran = run_text(ask(stream, block), given, shared, memory, threads, 0)
            assert not ran.conflicts
            assert ran.arrivals == {barrier: len(threads)}
            if stream.numbers and chunk == block == 0:
                _check_numbers(shared, memory, stream, tile)
            given = [held, stage, at, *totals]
            text = multiply(stream, size, block)
            totals, conflicts, *_ = run_text(
                text, given, shared, memory, stream.consumers, len(totals)
            )
            # Scales of a row lie side by side. At 4 bits, two of four boxes of short lines are in
            # the same banks.
            allowed = {"ld.shared.u16", "ld.shared.b32"}
            if stream.bits == 4:
                allowed.add("ld.shared.v4.b32")
            assert not conflicts - allowed, conflicts
    return totals


def _check_numbers(
    shared: Memory, memory: Memory, stream: TileStream, tile: tuple[int, int]
) -> None:
    """Behind the tile's slots is its last one."""
    first, filled = tile
    slots, _ = memory.stored_from(SLOTS, np.dtype(np.int32), (stream.slots,))
    found, there = shared.stored_from(NUMBERS, np.dtype(np.int32), (stream.rows,))
    assert there.all()
    wanted = slots[first + np.minimum(np.arange(stream.rows), filled - 1)]
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("programs", [PROGRAMS, 1])
@pytest.mark.parametrize("stream", [STREAMS[0], dataclasses.replace(STREAMS[0], tiles=1100)])
def test_items_of_a_program(stream, programs):
    """All items once, also where a program has more than threads."""
    rng = np.random.default_rng(0)
    arrays = [rng.integers(0, 100, stream.tiles).astype(np.int32) for _ in range(3)]
    addresses = [INPUTS + 8192 * index for index in range(3)]
    memory = Memory(INPUTS, 4 * 8192)
    for address, array in zip(addresses, arrays, strict=True):
        memory.put(address, array)
    listed, rows = 1024, []
    for program in range(programs):
        count = stream.listed(programs)
        shared = Memory(0, listed + ENTRY * count)
        operands = [program, *map(np.uint64, addresses), listed]
        run_text(list_items(stream, programs), operands, shared, memory, stream.threads, 0)
        found, there = shared.stored_from(listed, np.dtype(np.int32), (count, ENTRY // 4))
        assert there.all()
        rows.append(found)
    items = np.stack(rows, axis=1).reshape(-1, ENTRY // 4)[: stream.tiles * ITEMS]
    wanted = [*(np.repeat(array, ITEMS) for array in arrays)]
    wanted.append(np.tile(stream.item * np.arange(ITEMS, dtype=np.int32), stream.tiles))
    np.testing.assert_array_equal(items, np.stack(wanted, axis=1))


@pytest.mark.parametrize("stages", range(2, 7))
@pytest.mark.parametrize("chunks", range(1, 13))
def test_places_of_an_item_outlast_it(stages, chunks):
    """What comes with an item's first stage replaces that of an item all of whose stages, and one
    more, were given back: its warps have stored it by then."""
    places = dataclasses.replace(STREAMS[0], inputs=256 * chunks).places(stages)
    assert places * chunks - stages >= chunks > (places - 1) * chunks - stages
