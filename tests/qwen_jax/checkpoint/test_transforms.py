"""Regrouping of rows against loops written from the description of the layouts, and back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen_jax.checkpoint.mapping import Layout
from qwen_jax.checkpoint.tensors import stored_tensors
from qwen_jax.checkpoint.transforms import Piece

IN_FILES = Layout(experts="per_expert", linear_projections="interleaved", shared_expert="merged")
LINEAR = "layers.0.linear_attn."
MLP = "layers.0.mlp."


def regroup(config, stored, paths):
    """Gathers tree tensors from stored ones; NaN marks rows that no piece fills."""
    tree = {path: np.full(shape, np.nan, np.float32) for path, shape in paths.items()}
    for tensor in stored_tensors(config, IN_FILES).values():
        for piece in tensor.pieces:
            if piece.path in tree:
                piece.gather(tree[piece.path], stored[tensor.key])
    return tree


def ungroup(config, tree, keys):
    back = {}
    for key in keys:
        tensor = stored_tensors(config, IN_FILES)[key]
        back[key] = np.full(tensor.shape, np.nan, np.float32)
        for piece in tensor.pieces:
            piece.scatter(back[key], tree[piece.path])
    return back


def numbered(*shape):
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


heads = st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 5), st.integers(1, 5))


@given(heads)
def test_interleaved_projections_come_apart_head_by_head(tiny, sizes):
    key_heads, ratio, key_dim, value_dim = sizes
    value_heads = key_heads * ratio
    config = tiny(
        "qwen3_next",
        linear_num_key_heads=key_heads,
        linear_num_value_heads=value_heads,
        linear_key_head_dim=key_dim,
        linear_value_head_dim=value_dim,
    )
    hidden = config.hidden_size
    qkvz = numbered(2 * key_heads * key_dim + 2 * value_heads * value_dim, hidden)
    ba = numbered(2 * value_heads, hidden)

    q, k, v, z, b, a = [], [], [], [], [], []
    row = 0
    for _ in range(key_heads):
        q.append(qkvz[row : row + key_dim])
        k.append(qkvz[row + key_dim : row + 2 * key_dim])
        row += 2 * key_dim
        for _ in range(ratio):
            v.append(qkvz[row : row + value_dim])
            row += value_dim
        for _ in range(ratio):
            z.append(qkvz[row : row + value_dim])
            row += value_dim
    assert row == len(qkvz)
    for head in range(key_heads):
        for j in range(ratio):
            b.append(ba[2 * ratio * head + j : 2 * ratio * head + j + 1])
            a.append(ba[2 * ratio * head + ratio + j : 2 * ratio * head + ratio + j + 1])
    expected = {
        "in_proj_qkv": np.concatenate(q + k + v),
        "in_proj_z": np.concatenate(z),
        "in_proj_b": np.concatenate(b),
        "in_proj_a": np.concatenate(a),
    }
    stored = {
        f"model.{LINEAR}in_proj_qkvz.weight": qkvz,
        f"model.{LINEAR}in_proj_ba.weight": ba,
    }
    paths = {f"{LINEAR}{name}.weight": array.shape for name, array in expected.items()}
    tree = regroup(config, stored, paths)
    for name, array in expected.items():
        np.testing.assert_array_equal(tree[f"{LINEAR}{name}.weight"], array)
    for key, array in ungroup(config, tree, stored).items():
        np.testing.assert_array_equal(array, stored[key])


@given(st.tuples(st.integers(2, 5), st.integers(1, 6)))
def test_experts_are_stacked_gate_above_up(tiny, sizes):
    experts, width = sizes
    config = tiny("qwen3_moe", num_experts=experts, moe_intermediate_size=width)
    place, hidden = "layers.1.mlp.experts.", config.hidden_size
    stored = {}
    for e in range(experts):
        stored[f"model.{place}{e}.gate_proj.weight"] = 10.0 * e + numbered(width, hidden) / 1000
        stored[f"model.{place}{e}.up_proj.weight"] = 10.0 * e + 5 + numbered(width, hidden) / 1000
        stored[f"model.{place}{e}.down_proj.weight"] = 10.0 * e + numbered(hidden, width) / 1000
    paths = {
        f"{place}gate_up_proj": (experts, 2 * width, hidden),
        f"{place}down_proj": (experts, hidden, width),
    }
    tree = regroup(config, stored, paths)
    for e in range(experts):
        gate, up = (stored[f"model.{place}{e}.{name}_proj.weight"] for name in ("gate", "up"))
        np.testing.assert_array_equal(tree[f"{place}gate_up_proj"][e, :width], gate.astype("f4"))
        np.testing.assert_array_equal(tree[f"{place}gate_up_proj"][e, width:], up.astype("f4"))
        down = stored[f"model.{place}{e}.down_proj.weight"].astype("f4")
        np.testing.assert_array_equal(tree[f"{place}down_proj"][e], down)
    for key, array in ungroup(config, tree, stored).items():
        np.testing.assert_array_equal(array, stored[key].astype("f4"))


def test_merged_shared_expert_is_halved_gate_first(tiny):
    config = tiny("qwen3_next")
    width, hidden = config.width("shared_expert_intermediate_size", 0), config.hidden_size
    key = f"model.{MLP}shared_expert.gate_up_proj.weight"
    stored = {key: numbered(2 * width, hidden)}
    gate, up = (f"{MLP}shared_expert.{name}_proj.weight" for name in ("gate", "up"))
    tree = regroup(config, stored, {gate: (width, hidden), up: (width, hidden)})
    np.testing.assert_array_equal(tree[gate], stored[key][:width])
    np.testing.assert_array_equal(tree[up], stored[key][width:])
    np.testing.assert_array_equal(ungroup(config, tree, stored)[key], stored[key])


def test_gather_leaves_the_stored_array_as_it_was():
    stored, tree = numbered(4, 2), np.zeros((2, 4, 2), np.float32)
    before = stored.copy()
    stored.setflags(write=False)
    Piece("tree", "stored", 2, 0, 2, 0, expert=1).gather(tree, stored)
    np.testing.assert_array_equal(stored, before)
    np.testing.assert_array_equal(tree[1], before)
    np.testing.assert_array_equal(tree[0], 0)


@pytest.mark.parametrize("rows", [3, 5])
def test_row_counts_that_do_not_fit_are_refused(rows):
    with pytest.raises(ValueError, match=r"reshape|broadcast"):
        Piece("tree", "stored", 2, 0, 2, 0).gather(np.zeros((4, 1)), np.zeros((rows, 1)))
