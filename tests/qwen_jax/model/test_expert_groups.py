"""Experts of unequal width against a dense float64 loop; their folders, gradients and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

import qwen_jax
from qwen_jax import CausalLM, QwenConfig, initialise
from qwen_jax.checkpoint.mapping import Layout
from qwen_jax.checkpoint.tensors import stored_tensors
from qwen_jax.errors import ConfigError
from qwen_jax.model import RouterContext
from qwen_jax.model.moe import ExpertGroups
from tests.qwen_jax.conftest import TINY

WIDTHS = (5, 6, 7, 8)
GROUPED = TINY | {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 8,
    "expert_group_widths": list(WIDTHS),
    "num_hidden_layers": 1,
    "layer_types": ["full_attention"],
}
D, E, K = 32, 8, 3


@pytest.fixture(scope="module")
def model() -> CausalLM:
    return initialise(QwenConfig.from_hf(GROUPED), jax.random.key(1))


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def dense(mlp, x: np.ndarray) -> np.ndarray:
    """All experts over each token, one by one, and the shared expert; float64."""

    def array(variable) -> np.ndarray:
        return np.asarray(variable[...], np.float64)

    x, y = x.astype(np.float64), np.zeros(x.shape)
    logits = x @ array(mlp.gate.weight).T
    for m in range(len(x)):
        chosen = np.argsort(-logits[m], kind="stable")[:K]
        strength = np.exp(logits[m, chosen] - logits[m].max())
        for expert, weight in zip(chosen, strength / strength.sum(), strict=True):
            group, inside = divmod(int(expert), E // len(WIDTHS))
            gate, up = np.split(array(mlp.experts.groups[group].gate_up_proj)[inside] @ x[m], 2)
            assert len(gate) == WIDTHS[group]
            down = array(mlp.experts.groups[group].down_proj)[inside]
            y[m] += weight * (down @ (silu(gate) * up))
        shared = mlp.shared_expert
        h = silu(array(shared.gate_proj.weight) @ x[m]) * (array(shared.up_proj.weight) @ x[m])
        strength = 1 / (1 + np.exp(-array(mlp.shared_expert_gate.weight) @ x[m]))
        y[m] += strength * (array(shared.down_proj.weight) @ h)
    return y


def layer(mlp, x):
    batch, tokens, _ = x.shape
    positions = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32)[None], (batch, tokens))
    context = RouterContext(positions >= 0, x, positions, positions, layer=0)
    return mlp(x, context, x)[0]


@pytest.mark.parametrize("tokens", [7, 70])
def test_the_layer_is_the_dense_loop(model, tokens):
    """7 and 70 tokens are the two ways of the dispatch."""
    mlp = model.layers[0].mlp
    assert isinstance(mlp.experts, ExpertGroups)
    x = np.random.default_rng(0).standard_normal((1, tokens, D), np.float32)
    found = jax.jit(layer)(mlp, jnp.asarray(x))[0]
    np.testing.assert_allclose(found, x[0] + dense(mlp, x[0]), atol=1e-5)


def test_gradients_are_those_of_the_loop(model):
    """Each group's down projections, by finite differences of the float64 loop."""
    mlp = model.layers[0].mlp
    x = np.random.default_rng(1).standard_normal((1, 9, D), np.float32)
    state, target = nnx.state(mlp), np.random.default_rng(2).standard_normal((9, D))

    def loss(state):
        filled = nnx.merge(nnx.graphdef(mlp), state)
        return jnp.sum(layer(filled, jnp.asarray(x))[0] * jnp.asarray(target, jnp.float32))

    gradient = jax.jit(jax.grad(loss))(state)
    step = 1e-3
    for group in range(len(WIDTHS)):
        weight = mlp.experts.groups[group].down_proj
        before, place = np.asarray(weight[...]), (1, 3, 2)
        ends = []
        for sign in (1, -1):
            moved = before.copy()
            moved[place] += sign * step
            weight.set_value(jnp.asarray(moved))
            ends.append((dense(mlp, x[0]) * target).sum())
        weight.set_value(jnp.asarray(before))
        found = gradient["experts"]["groups"][group]["down_proj"][...][place]
        assert found == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=1e-3, abs=1e-4)


def test_a_folder_gives_the_same_model(model, tmp_path: Path):
    tree = {".".join(map(str, p)): v[...] for p, v in nnx.to_flat_state(nnx.state(model))}
    arrays = {}
    for key, tensor in stored_tensors(model.config, Layout()).items():
        arrays[key] = np.zeros(tensor.shape, np.float32)
        for piece in tensor.pieces:
            piece.scatter(arrays[key], np.asarray(tree.pop(piece.path)))
    assert not tree
    assert arrays["model.layers.0.mlp.experts.groups.2.down_proj"].shape == (2, D, 7)
    save_file(arrays, tmp_path / "model.safetensors")
    config = model.config.to_hf()
    assert config["expert_group_widths"] == list(WIDTHS)
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded, _ = qwen_jax.load(tmp_path)
    assert loaded.config == model.config
    for found, wanted in zip(jax.tree.leaves(loaded), jax.tree.leaves(model), strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"expert_group_widths": [5, 6, 8]}, "'3 long'; accepted: a number of groups that divides"),
        ({"expert_group_widths": [5, 9]}, "moe_intermediate_size is 8; accepted: 9"),
        ({"expert_group_widths": [0, 8]}, "expert_group_widths is .*at least 1"),
        ({"model_type": "qwen3", "expert_group_widths": []}, None),
    ],
)
def test_widths_that_make_no_model_are_refused(changes, message):
    if message is None:
        assert "expert_group_widths" not in QwenConfig.from_hf(TINY).to_hf()
        return
    with pytest.raises(ConfigError, match=message):
        QwenConfig.from_hf(GROUPED | changes)
