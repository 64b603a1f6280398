"""Codes in words: against one big number a unit, and there and back."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.dequant_matmul import awaited, layout, pairs, unit
from pallas_kernels.dequant_matmul.unit import centred, offsets, positions
from pallas_kernels.testing import interpreted


def drawn(bits: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(bits).integers(0, 2**bits, shape).astype(np.uint8)


@st.composite
def matrices(draw):
    bits = draw(st.sampled_from(layout.BITS))
    inputs = draw(st.integers(1, 131))
    code = st.integers(0, 2**bits - 1)
    rows = draw(st.lists(st.lists(code, min_size=inputs, max_size=inputs), min_size=1, max_size=3))
    return bits, np.array(rows, np.uint8)


@settings(max_examples=60, deadline=None)
@given(matrices())
def test_round_trip(matrix):
    bits, values = matrix
    codes = layout.pack(values, bits)
    assert codes.dtype == np.uint32
    assert codes.shape == (len(values), bits, -(-values.shape[1] // 32))
    np.testing.assert_array_equal(layout.unpack(codes, values.shape[1]), values)


@pytest.mark.parametrize("bits", layout.BITS)
@pytest.mark.parametrize("inputs", [1, 64])
def test_jax_gives_the_words_of_numpy(bits, inputs):
    values = drawn(bits, 2, 3, inputs)
    codes = jax.jit(layout.pack, static_argnums=1)(jnp.asarray(values), bits)
    np.testing.assert_array_equal(codes, layout.pack(values, bits))
    back = jax.jit(layout.unpack, static_argnums=1)(codes, inputs)
    assert back.dtype == jnp.uint8
    np.testing.assert_array_equal(back, values)


def test_words_are_those_that_the_layout_names():
    three = np.array([i % 8 for i in range(30)] + [0b011, 0b110])
    halves = [
        sum(int(three[10 * i + 2 * j + half]) << 3 * j for j in range(5))
        | (int(three[30 + half]) >> i & 1) << 15
        for i in range(3)
        for half in range(2)
    ]
    words = [low | high << 16 for low, high in zip(halves[::2], halves[1::2], strict=True)]
    np.testing.assert_array_equal(layout.pack(three, 3)[:, 0], words)
    four = layout.pack(np.arange(32) % 16, 4)[:, 0]
    np.testing.assert_array_equal(four, [0x75316420, 0xFDB9ECA8] * 2)
    eight = layout.pack(np.arange(200, 232), 8)[:, 0]
    assert eight[0] == 200 | 202 << 8 | 201 << 16 | 203 << 24
    assert eight[7] == 228 | 230 << 8 | 229 << 16 | 231 << 24


@pytest.mark.parametrize("bits", layout.BITS)
def test_tail_is_zero_and_ignored(bits):
    values = drawn(bits, 2, 40)
    codes = layout.pack(values, bits)
    assert not layout.unpack(codes, 64)[:, 40:].any()
    tail = layout.pack(np.pad(0 * values, ((0, 0), (0, 24)), constant_values=2**bits - 1), bits)
    np.testing.assert_array_equal(layout.unpack(codes | tail, 40), values)


@pytest.mark.parametrize("bits", layout.BITS)
@pytest.mark.parametrize(("group_size", "inputs"), [(32, 200), (64, 1), (128, 128)])
def test_numbers_of_codes(bits, group_size, inputs, normal):
    values, groups = drawn(bits, 3, inputs), layout.group_count(inputs, group_size)
    scale, zero = normal(3, groups), normal(3, groups)
    centre = {3: 3.5, 4: 7.5, 8: 128.0}[bits]
    plain, shifted = (
        layout.dequantise(
            jnp.asarray(layout.pack(values, bits)),
            jnp.asarray(scale),
            None if z is None else jnp.asarray(z),
            inputs,
            group_size,
        )
        for z in (None, zero)
    )
    for i in range(inputs):
        g = i // group_size
        np.testing.assert_allclose(plain[:, i], scale[:, g] * (values[:, i] - centre), rtol=1e-6)
        expected = scale[:, g] * (values[:, i] - zero[:, g])
        np.testing.assert_allclose(shifted[:, i], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bits", layout.BITS)
def test_values_inside_a_kernel_are_exact(bits):
    """Every code at every place of a unit."""
    values = (np.arange(2**bits)[:, None] + np.arange(32)) % 2**bits
    words = jnp.asarray(layout.pack(values, bits))
    with interpreted():
        found = centred([words[:, word] for word in range(bits)])
    assert found.dtype == jnp.bfloat16
    expected = values - layout.CENTRES[bits]
    np.testing.assert_array_equal(np.asarray(found, np.float64), expected)


def assembled(text: str, *arguments: Any) -> dict[str, Any]:
    """Registers after instructions on uint32 and float32, those of 16 bits as float32."""
    at: dict[str, Any] = {f"${i}": np.asarray(value) for i, value in enumerate(arguments, 1)}

    def halves(register: str) -> list[Any]:
        word = at[register]
        return [(word >> np.uint32(by) << np.uint32(16)).view(np.float32) for by in (0, 16)]

    def value(name: str) -> Any:
        return at[name] if name in at else np.uint32(int(name, 0))

    for line in text.strip("{} ").split(";"):
        if not line.strip() or line.strip().startswith(".reg"):
            continue
        operation, rest = line.strip().split(" ", 1)
        if "{" in rest:
            pair, source = rest.strip("{").split("}, ")
            for name, half in zip(pair.split(", "), halves(source), strict=True):
                at[name] = half
            continue
        to, *names = (name.strip() for name in rest.split(","))
        values = [value(name) for name in names]
        match operation:
            case "shl.b32":
                at[to] = values[0] << values[1]
            case "shr.b32" | "shr.u32":
                at[to] = values[0] >> values[1]
            case "lop3.b32" if names[3] == "0xEA":
                at[to] = (values[0] & values[1]) | values[2]
            case "lop3.b32" if names[3] == "0x96":
                at[to] = values[0] ^ values[1] ^ values[2]
            case "xor.b32":
                at[to] = values[0] ^ values[1]
            case "popc.b32":
                at[to] = np.bitwise_count(values[0]).astype(np.uint32)
            case "mov.b32" if to == "value":
                at[to] = values[0].view(np.float32)
            case "mov.b32" | "mov.f32":
                at[to] = values[0]
            case "fma.rn.f32":
                at[to] = np.float32(values[0]) * values[1] + values[2]
            case "fma.rn.bf16x2":
                a, b, c = (halves(name) for name in names)
                exact = [x * y + z for x, y, z in zip(a, b, c, strict=True)]
                low, high = (np.asarray(x, jnp.bfloat16).view(np.uint16) for x in exact)
                np.testing.assert_array_equal(low.view(jnp.bfloat16), exact[0])
                at[to] = low | high.astype(np.uint32) << np.uint32(16)
            case _:
                raise ValueError(operation)
    return at


@pytest.mark.parametrize("bits", layout.BITS)
def test_assembly_gives_every_code_at_every_place(bits, monkeypatch):
    """Interpreted kernels run none of it."""
    expected = (np.arange(2**bits)[:, None] + np.arange(32)) % 2**bits
    codes = layout.pack(expected, bits)
    words = [codes[:, word, 0] for word in range(bits)]
    for value in range(32):
        inputs = [np.float32(i == value) for i in range(32)]
        found = assembled(unit._multiplied(bits), *words, *inputs, np.float32(0))["$0"]
        np.testing.assert_array_equal(found - offsets(bits)[value], expected[:, value])

    def run(text: str, arguments: Any, *_: Any) -> Any:
        return jnp.asarray(assembled(text, np.asarray(arguments[0]).view(np.uint32))["$0"])

    monkeypatch.setattr(pairs, "assembled", run)
    found = pairs.values([jnp.asarray(word) for word in words], bits)
    np.testing.assert_array_equal(np.stack(found, 1), expected - layout.CENTRES[bits])


@pytest.mark.parametrize("count", [1, 2, 3, 16, 64, 65])
def test_what_awaits_words_needs_each_of_them_and_is_zero(count, monkeypatch):
    """Also where all bits are set. Interpreted kernels run none of it."""
    rng, texts = np.random.default_rng(0), []
    words = rng.integers(0, 2**32, (count, 100), np.uint32)
    words[:, 0] = 2**32 - 1
    words[1:, :2] = 0

    def run(text: str, arguments: Any, *_: Any) -> Any:
        texts.append(text)
        arrays = [np.asarray(argument).view(np.uint32) for argument in arguments]
        return jnp.asarray(assembled(text, *arrays)["$0"].view(np.float32))

    monkeypatch.setattr(awaited, "assembled", run)
    numbers = [jnp.asarray(word) for word in words[1:]] + [jnp.asarray(words[0].view(np.float32))]
    zero = awaited.zero_behind(numbers)
    assert zero.dtype == jnp.float32
    np.testing.assert_array_equal(np.asarray(zero).view(np.uint32), 0)
    for number in range(1, count + 1):
        assert len(re.findall(rf"\${number}\b", texts[0])) == 1


@pytest.mark.parametrize("bits", layout.BITS)
def test_fields_lie_inside_the_mantissa(bits):
    assert all(0 < position <= 23 - bits for position in positions(bits))
    # Beside 24 bits of a sum, what the 1 of a mantissa costs, in steps of the largest code.
    assert max(offsets(bits)) / 2**bits <= 2**10


@pytest.mark.parametrize(
    ("values", "bits", "reason"),
    [
        (np.array([0, 8]), 3, "run from 0 to 8; accepted is 0 to 7 at 3 bits"),
        (np.array([-1, 3]), 4, "run from -1 to 3; accepted is 0 to 15 at 4 bits"),
        (np.array([1]), 5, "codes have 5 bits; accepted is 3, 4 or 8"),
        (np.array([1.0]), 3, r"float64\[1\]; accepted are integers"),
        (np.zeros((2, 0), int), 3, r"\[2, 0\]; accepted are integers along an axis that holds"),
    ],
)
def test_what_cannot_be_packed(values, bits, reason):
    with pytest.raises(ValueError, match=reason):
        layout.pack(values, bits)


@pytest.mark.parametrize(
    ("codes", "inputs", "reason"),
    [
        (np.zeros((3, 2), np.int32), 64, "codes are int32"),
        (np.zeros(3, np.uint32), 64, r"accepted is uint32 \[... Q U\]"),
        (np.zeros((5, 2), np.uint32), 64, "codes have 5 bits"),
        (np.zeros((3, 2), np.uint32), 65, "hold 2 units of 32 values; 65 values need 3"),
        (np.zeros((3, 2), np.uint32), 32, "hold 2 units of 32 values; 32 values need 1"),
    ],
)
def test_what_cannot_be_unpacked(codes, inputs, reason):
    with pytest.raises(ValueError, match=reason):
        layout.unpack(codes, inputs)
