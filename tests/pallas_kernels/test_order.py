"""The launch before products of tokens that share experts: its table, and tokens in two orders."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._compat import lower_for_cuda
from pallas_kernels.dequant_matmul.config import SomeRows
from pallas_kernels.dequant_matmul.qtensor import QTensor
from pallas_kernels.dequant_matmul.turn import Turn
from pallas_kernels.expert_dispatch import order
from pallas_kernels.expert_dispatch.joint import Joint
from pallas_kernels.expert_dispatch.order import in_order, ordered
from pallas_kernels.expert_dispatch.specs import Spec
from pallas_kernels.testing import interpreted
from tests.pallas_kernels.places import Rows, load, touched

EXPERTS = 7


def reader(width: int, bits: int, group_size: int, rows: int, blocks: int = 1) -> Joint:
    """A matrix of so many inputs, of which the order of inputs is all that counts."""
    weight = Spec(1, group_size=group_size).weight((8, width), bits)
    weight = jax.tree.map(lambda like: jnp.zeros(like.shape, like.dtype), weight)
    assert isinstance(weight, QTensor)
    return Joint.of(weight, 8, SomeRows(rows, 16, blocks=blocks))


def wanted_by(readers: list[Joint]) -> tuple[int, list[tuple[Turn, int]]]:
    """Slots of a row, and the orders of tokens."""
    return readers[0].cut.rows, [(each.turn, each.columns) for each in readers]


def table(ids: np.ndarray, experts: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Expert by expert, its slots and those behind each of them."""
    flat, count = ids.reshape(-1).tolist(), ids.size
    firsts, slots = np.full(count, -1), np.full((count, rows), count)
    for expert in range(experts):
        own = [slot for slot in range(count) if flat[slot] == expert]
        for place, slot in enumerate(own):
            behind = own[place : place + rows]
            slots[slot, : len(behind)] = behind
            if place % rows == 0:
                firsts[slot] = expert
    return firsts, slots


def turned(x: np.ndarray, width: int, copies: int, columns: int) -> np.ndarray:
    """Instruction by instruction, the 16 inputs that it takes of four threads.

    Two pairs of a thread's part: pair t of the first eight and pair t of the others are thread t's.
    """
    wide = np.zeros((x.shape[0], columns), np.float64)
    wide[:, : x.shape[1]] = x
    result = np.zeros((copies, *wide.shape))
    for block in range(0, columns, 4 * width):
        for instruction in range(width // 4):
            for thread in range(4):
                first = block + thread * width + 4 * instruction
                place = block + 16 * instruction + 2 * thread
                copy = thread * copies // 4
                result[copy, :, place : place + 2] = wide[:, first : first + 2]
                result[copy, :, place + 8 : place + 10] = wide[:, first + 2 : first + 4]
    return result.reshape(-1, columns)


def check(ids: np.ndarray, width: int, dtype: str, readers: list[Joint]) -> None:
    """All that the launch makes; nothing of it is rounded but tokens."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((ids.shape[0], width)), dtype)
    run = jax.jit(lambda x, ids: ordered(x, ids, EXPERTS, *wanted_by(readers)))
    found = run(x, jnp.asarray(ids, jnp.int32))
    firsts, slots = table(ids, EXPERTS, readers[0].cut.rows)
    np.testing.assert_array_equal(found.experts, firsts)
    np.testing.assert_array_equal(found.slots, slots)
    narrow = np.asarray(x.astype(jnp.bfloat16), np.float64)
    for inputs, each in zip(found.inputs, readers, strict=True):
        # At 3 bits a part is a unit, and groups that are multiplied together have copies each.
        part, copies = (32, 4 // each.shape.group_units) if each.shape.bits == 3 else (8, 1)
        step = 128 * each.cut.blocks
        wanted = turned(narrow, part, copies, -(-width // step) * step)
        assert inputs.dtype == jnp.bfloat16
        np.testing.assert_array_equal(np.asarray(inputs, np.float64), wanted)


def drawn(tokens: int, slots: int) -> np.ndarray:
    """Some slots are empty: of the last expert and one more, and of -1."""
    return np.random.default_rng(tokens).integers(-1, EXPERTS + 2, (tokens, slots))


# Ids, inputs, dtype of tokens, and the readers' bits, group, rows and blocks.
THREE, EIGHT = (3, 64, 4, 2), (8, 64, 8, 1)
# A program to a token, where the other order of the same tokens takes two.
THREE_SHORT = (3, 64, 4, 1)
CASES = {
    "one token": (drawn(1, 4), 600, "float32", [THREE, EIGHT]),
    "one slot": (np.array([[3]]), 256, "bfloat16", [EIGHT]),
    "no slot is filled": (np.full((5, 2), EXPERTS), 40, "float32", [THREE]),
    "one expert": (np.full((65, 1), EXPERTS - 1), 128, "float32", [EIGHT]),
    "ids far outside": (
        np.array([[-(2**31), 2**31 - 1, 0], [0, -1, EXPERTS]]),
        600,
        "bfloat16",
        [(3, 32, 2, 2), THREE],
    ),
    "63 slots": (drawn(21, 3), 420, "bfloat16", [(3, 128, 8, 1), (4, 64, 8, 2)]),
    "64 slots": (drawn(16, 4), 512, "float32", [(4, 32, 8, 2), EIGHT]),
    "two read alike": (drawn(13, 5), 330, "float32", [EIGHT, (4, 128, 16, 1)]),
    "orders of other lengths": (drawn(3, 2), 130, "float32", [THREE_SHORT, (8, 64, 8, 4)]),
    "64 tokens, 10 slots": (drawn(64, 10), 200, "float32", [THREE, (3, 64, 8, 1)]),
}


def check_case(name: str) -> None:
    ids, width, dtype, readers = CASES[name]
    check(ids, width, dtype, [reader(width, *each) for each in readers])


@pytest.mark.parametrize("name", CASES)
def test_order_equals_the_formula(name):
    with interpreted():
        check_case(name)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_order_on_a_gpu(name):
    check_case(name)


def check_in_order(tokens: int, width: int, part: int, dtype: str) -> None:
    x = jnp.asarray(np.random.default_rng(0).standard_normal((tokens, width)), dtype)
    found = jax.jit(lambda x: in_order(x, Turn(part)))(x)
    assert found.dtype == jnp.bfloat16
    wanted = turned(np.asarray(x.astype(jnp.bfloat16), np.float64), part, 1, width)
    np.testing.assert_array_equal(np.asarray(found, np.float64), wanted)


# Tokens, inputs, inputs of a part, and dtype of tokens.
ALONE = [(65, 512, 32, "float32"), (200, 768, 8, "bfloat16"), (1, 256, 32, "bfloat16")]


@pytest.mark.parametrize("case", ALONE, ids=str)
def test_tokens_alone_in_order(case):
    with interpreted():
        check_in_order(*case)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*ALONE, (8192, 2048, 32, "float32")], ids=str)
def test_tokens_alone_in_order_on_a_gpu(case):
    check_in_order(*case)


def test_those_that_read_alike_share_an_array():
    readers = [reader(330, *each) for each in (EIGHT, (4, 128, 16, 1), THREE)]
    with interpreted():
        found = ordered(jnp.ones((2, 330)), jnp.zeros((2, 1), jnp.int32), 1, *wanted_by(readers))
    first, second, third = found.inputs
    assert first is second
    assert third is not first


@pytest.mark.parametrize("name", CASES)
def test_lowers_for_cuda(name):
    ids, width, dtype, readers = CASES[name]
    joints = [reader(width, *each) for each in readers]
    rows, wanted = wanted_by(joints)
    run = functools.partial(ordered, experts=EXPERTS, rows=rows, wanted=wanted)
    struct = jax.ShapeDtypeStruct
    arguments = struct((ids.shape[0], width), dtype), struct(ids.shape, jnp.int32)
    assert lower_for_cuda(run, *arguments).count("xla.gpu.triton") == 1


@pytest.mark.parametrize("width", [130, 256, 600])
def test_every_column_is_written_once_and_none_past_the_end(monkeypatch, width):
    written: dict[Rows, list[np.ndarray]] = {}

    def store(at: Any, _: Any, mask: Any = None) -> None:
        written.setdefault(at[0], []).append(touched(at, mask))

    monkeypatch.setattr(order, "load", load)
    monkeypatch.setattr(order.plt, "store", store)
    readers = [reader(width, 3, 64, 4), reader(width, 8, 64, 8, 4)]
    refs = [Rows(*each.struct_of(3).shape) for each in readers]
    turns, columns = [each.turn for each in readers], order.COLUMNS
    for index in range(3 * order._programs(refs, columns)):
        order._write_columns(Rows(3, width), index, turns, refs, columns)
    for ref in refs:
        places = np.sort(np.concatenate(written[ref]))
        np.testing.assert_array_equal(places, np.arange(np.prod(ref.shape)))
