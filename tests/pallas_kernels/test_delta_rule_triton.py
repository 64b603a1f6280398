"""The Triton kernels of `gated_delta_rule`: interpreted, lowered, and what they refuse."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._compat import H200, Target, lower_for_cuda
from pallas_kernels.delta_rule import api, gated_delta_rule
from pallas_kernels.delta_rule.config import decode_config, pass_config
from pallas_kernels.delta_rule.specs import SPECS, Spec
from pallas_kernels.testing import decode_bar, interpreted, relative_error
from tests.pallas_kernels.layers import Layer, assert_ring
from tests.pallas_kernels.modules import written_in_place

DECODE = Layer(key_heads=2, heads=6, key_width=32, value_width=64)
CHUNKS = Layer(key_heads=1, heads=2, key_width=32, value_width=32)
LENGTHS = (200, 65, 64, 0, 63, 1)
START = (0, 5, 64, 7, 0, 2)


@functools.cache
def interpreted_run():
    """Compiled once a shape, for all tests."""
    return jax.jit(functools.partial(gated_delta_rule, implementation="triton"))


def run_interpreted(*arrays):
    with interpreted():
        return interpreted_run()(*arrays)


def run_on_gpu(*arrays):
    return jax.jit(functools.partial(gated_delta_rule, implementation="triton"))(*arrays)


def check(
    layer: Layer,
    inputs,
    start,
    lengths,
    run,
    *,
    dtype="float32",
    state_dtype="float32",
    slots=None,
    zero_padding=True,
):
    """Compares a call with the formulas, where NaN is all that must not be read.

    With `slots`, the states have two rows more than there are sequences.
    """
    dtype, rng = jnp.dtype(dtype), np.random.default_rng(4)
    batch, width, _ = inputs[0].shape
    held = batch if slots is None else batch + 2
    ring, state = (np.array(x) for x in layer.states(held, np.nan))
    rows = np.arange(batch) if slots is None else np.array(slots)
    rows, outside = np.clip(rows, 0, held - 1), (rows < 0) | (rows >= held)
    ring, state = ring.astype(dtype), state.astype(jnp.dtype(state_dtype))
    inputs = [x.astype(dtype) for x in inputs]
    known = []  # inputs by position, of which the call may see the last before `start`
    for row, (before, count) in enumerate(zip(start, lengths, strict=True)):
        for x in inputs:
            x[row, count:] = np.nan
        if outside[row]:
            known.append(None)
            continue
        past = rng.standard_normal((before, layer.channels)).astype(dtype)
        for position in range(max(0, before - layer.taps + 1), before):
            ring[rows[row], :, position % layer.taps] = past[position]
        if before:
            state[rows[row]] = rng.standard_normal(state[row].shape)
        known.append(np.concatenate([past, inputs[0][row, :count]]))
    weights = layer.conv_weight.astype(dtype), layer.a_log, layer.dt_bias
    counts = np.array(start, np.int32), np.array(lengths, np.int32)
    if slots is not None:
        counts += (np.array(slots, np.int32),)
    mixed, new_ring, new_state = map(np.asarray, run(*inputs, *weights, ring, state, *counts))
    assert (mixed.dtype, new_ring.dtype, new_state.dtype) == (dtype, dtype, state.dtype)

    wide = [x.astype(np.float64) for x in weights]
    own = 1e-5 if width == 1 else 1e-4
    state_bar = own if width == 1 or dtype == jnp.float32 else 1e-3
    counts = np.where(outside, 0, lengths)
    for row in set(range(held)) - set(rows[counts > 0]):
        assert new_ring[row].tobytes() == ring[row].tobytes()
        assert new_state[row].tobytes() == state[row].tobytes()
    for row, (before, count) in enumerate(zip(start, counts, strict=True)):
        assert not (zero_padding and mixed[row, count:].any())
        if count == 0:
            continue
        history = np.zeros((layer.taps - 1, layer.channels))
        seen = known[row][max(0, before - layer.taps + 1) : before]
        history[layer.taps - 1 - len(seen) :] = seen
        real = [x[row, :count].astype(np.float64) for x in inputs]
        at = rows[row]
        given = state[at].astype(np.float64) if before else None
        read, after = layer.oracle(*real, *wide, state=given, history=history)
        bar = own if dtype == jnp.float32 else decode_bar(read, dtype.name)
        assert relative_error(mixed[row, :count], read) <= bar
        bar = state_bar if state.dtype == jnp.float32 else decode_bar(after, state.dtype.name)
        assert relative_error(new_state[at], after) <= bar
        assert_ring(new_ring[at], known[row])


DECODING = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16", "state_dtype": "bfloat16"},
    "slots": {"slots": (8, 0, 3, -1, 7, 9, 2)},
}


def check_decode(run, dtypes):
    start, lengths = (0, 1, 2, 3, 6, 9, 0), (1, 1, 1, 1, 1, 0, 0)
    check(DECODE, DECODE.inputs(7, 1), start, lengths, run, **dtypes)


def check_chunks(kind, run):
    qkv, b, a = CHUNKS.inputs(len(LENGTHS), max(LENGTHS))
    if kind.startswith("repeating"):
        qkv, b = np.resize(qkv[:, :3].swapaxes(0, 1), qkv.swapaxes(0, 1).shape), b + 4
        qkv = np.ascontiguousarray(qkv.swapaxes(0, 1))
    if kind == "repeating, weak decays":
        a = a - 12
    if "strong decays at times" in kind:
        a = np.where(np.random.default_rng(5).random(a.shape) < 0.2, 30, -12).astype(np.float32)
    options = {"dtype": "bfloat16", "slots": (3, 7, 0, 1, 8, 5)} if "bfloat16" in kind else {}
    check(CHUNKS, [qkv, b, a], START, LENGTHS, run, **options)


KINDS = (
    "random",
    "repeating, weak decays",
    "repeating, strong decays at times",
    "bfloat16, strong decays at times, slots",
)


@pytest.mark.parametrize("name", DECODING)
def test_interpreted_decoding_equals_the_formulas(name):
    check_decode(run_interpreted, DECODING[name])


# Kinds that share a program are one test: another process would compile it again.
@pytest.mark.parametrize("kinds", [KINDS[:3], KINDS[3:]], ids=["float32", "bfloat16"])
def test_interpreted_chunks_equal_the_formulas(optimised, kinds):
    for kind in kinds:
        check_chunks(kind, run_interpreted)


@pytest.mark.parametrize("length", [1, 65])
def test_the_reference_takes_slots(length):
    start, lengths = (0, 1, 2, 3, 6), (1, 1, 0, 1, 1) if length == 1 else (65, 1, 0, 64, 63)
    run = jax.jit(functools.partial(gated_delta_rule, implementation="reference"))
    check(
        CHUNKS,
        CHUNKS.inputs(5, length),
        start,
        lengths,
        run,
        slots=(6, -1, 3, 0, 7),
        zero_padding=False,
    )


@pytest.mark.gpu
@pytest.mark.parametrize("name", DECODING)
def test_decoding_on_a_gpu_equals_the_formulas(name):
    check_decode(run_on_gpu, DECODING[name])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_chunks_on_a_gpu_equal_the_formulas(kind):
    check_chunks(kind, run_on_gpu)


LOWERED = (
    "decode, batch 1",
    "decode, batch 1, 48 heads",
    "decode, batch 32, bfloat16 state",
    "prefill, 512 tokens",
    "prefill, 8k, float32",
    "prefill, 200 tokens, widths 32",
)


@pytest.mark.parametrize("name", LOWERED)
def test_kernels_lower_for_cuda(name):
    module = lower_for_cuda(gated_delta_rule, *SPECS[name].arguments())
    names = ["decode"] if "decode" in name else ["inputs", "overlap", "inverse", "pass"]
    for kernel in names:
        assert f"delta_rule_{kernel}" in module
    assert module.count("xla.gpu.triton") == len(names)


@pytest.mark.parametrize("slots", [False, True])
@pytest.mark.parametrize(
    ("name", "states"),
    [
        ("decode, batch 8", ["8x8192x4xbf16", "8x32x128x128xf32"]),
        # XLA writes the ring of the convolution.
        ("prefill, 512 tokens", ["1x32x128x128xf32"]),
    ],
)
def test_kernels_write_states_in_place(name, states, slots):
    arguments = SPECS[name].arguments()
    arguments += arguments[-1:] if slots else ()
    module = lower_for_cuda(gated_delta_rule, *arguments)
    assert module.count("xla.gpu.triton") == (1 if "decode" in name else 4)
    assert written_in_place(module) == states


def choose(target=H200, *, a_log="float32", **changes):
    arguments = list(dataclasses.replace(SPECS["decode, batch 8"], **changes).arguments())
    arguments[4] = jax.ShapeDtypeStruct(arguments[4].shape, a_log)
    return api.OPERATION.choose(*arguments, implementation=None, target=target)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"heads": 16},
        {"heads": 48, "length": 515},
        {"dtype": "float32", "state_dtype": "bfloat16"},
        {"key_width": 64, "value_width": 32, "taps": 1},
        {"target": Target("gpu", "NVIDIA GeForce RTX 4090", 128, (8, 9)), "length": 64},
    ],
)
def test_a_gpu_takes_the_kernels(changes):
    choice = choose(**changes)
    assert (choice.chosen, choice.refused) == ("triton", {})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"key_width": 96}, "key width 96 is not one of 32, 64, 128"),
        ({"value_width": 256}, "value width 256 is not one of 32, 64, 128"),
        ({"dtype": "float16"}, "conv_state is float16, not bfloat16 or float32"),
        ({"a_log": "bfloat16"}, "a_log is bfloat16, not float32"),
        ({"length": 2**26}, "8 x 67108864 tokens are too many"),
        ({"target": Target("cpu", "cpu")}, "it needs a GPU, and the call is for cpu"),
    ],
)
def test_refusals_of_the_kernels(changes, reason):
    choice = choose(**changes)
    assert choice.chosen == "reference"
    assert any(reason in said for said in choice.refused["triton"])


@pytest.mark.parametrize(
    ("heads", "reason"),
    [(24, "24 value heads cannot share 16 key heads evenly"), (-1, "4096 channels are not")],
)
def test_calls_without_a_meaning_are_refused_by_all(heads, reason):
    arguments = list(Spec(heads=max(heads, 32)).arguments())
    if heads > 0:
        arguments = list(Spec(heads=heads).arguments())
    else:
        for at, shape in ((0, (1, 1, 4096)), (3, (4096, 4)), (6, (1, 4096, 4))):
            arguments[at] = jax.ShapeDtypeStruct(shape, arguments[at].dtype)
    choice = api.OPERATION.choose(*arguments, implementation=None, target=H200)
    assert choice.chosen is None
    for said in choice.refused.values():
        assert any(reason in text for text in said)


@pytest.mark.parametrize(
    ("rows", "slots", "reason"),
    [
        ((9, 9), None, "have (9, 9) rows, not 8 each: name their slots"),
        ((9, 8), (8,), "delta_state is [P M Q R] = [8, 32, 128, 128], but P is 9 in conv_state"),
        ((9, 9), (9,), "slots is [B] = [9], but B is 8 in qkv"),
    ],
)
def test_slots_fit_sequences_and_states(rows, slots, reason):
    arguments = list(SPECS["decode, batch 8"].arguments())
    for at, count in zip((6, 7), rows, strict=True):
        x = arguments[at]
        arguments[at] = jax.ShapeDtypeStruct((count, *x.shape[1:]), x.dtype)
    slots = None if slots is None else jax.ShapeDtypeStruct(slots, jnp.int32)
    choice = api.OPERATION.choose(*arguments, slots, implementation=None, target=H200)
    assert choice.chosen is None
    assert all(any(reason in text for text in said) for said in choice.refused.values())


def test_many_programs_take_wider_tiles_and_small_memories_load_nothing_ahead():
    state = {name: SPECS[name].arguments()[7] for name in ("decode, batch 1", "decode, batch 64")}
    tiles = [decode_config(H200, each.shape[0], each).tile for each in state.values()]
    assert tiles == [32, 64]
    small = Target("gpu", "NVIDIA GeForce RTX 4090", 128, (8, 9))
    given = SPECS["prefill, 8k"].arguments()[0], state["decode, batch 1"]
    stages = [pass_config(target, *given).num_stages for target in (H200, small)]
    assert stages == [2, 1]
