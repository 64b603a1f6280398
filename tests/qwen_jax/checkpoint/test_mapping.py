"""The table as a whole: released parameter counts, and that it is a bijection in every layout."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest

from qwen_jax.checkpoint.keys import HEAD_PREFIXES, PREFIXES, parse_key, speller
from qwen_jax.checkpoint.mapping import Layout
from qwen_jax.checkpoint.tensors import stored_tensors, tree_tensors
from qwen_jax.config import QwenConfig

LAYOUTS = [
    Layout("model.", "", *groups)
    for groups in itertools.product(
        ("fused", "per_expert"), ("split", "interleaved"), ("split", "merged")
    )
]


def total(tensors):
    return sum(math.prod(tensor.shape) for tensor in tensors.values())


@pytest.mark.parametrize(
    ("preset", "layout", "tensors", "parameters"),
    [
        # 1,045 tensors in the index, less 19 of the MTP head and 333 of the vision tower.
        ("qwen3.6-35b-a3b", Layout("model.language_model."), 693, 34_660_610_688),
        # Per expert, with the 18,432 routed matrices one by one.
        ("qwen3-30b-a3b", Layout(experts="per_expert"), 18_867, 30_532_122_624),
    ],
)
def test_released_checkpoints_are_counted_exactly(preset, layout, tensors, parameters):
    config = QwenConfig.preset(preset)
    stored = stored_tensors(config, layout)
    assert len(stored) == tensors
    assert total(stored) == total(tree_tensors(config)) == parameters


@pytest.mark.parametrize(
    ("preset", "experts", "tensors", "parameters"),
    [
        # Qwen3.5-35B-A3B has its MTP experts one by one, Qwen3.6-35B-A3B stacked.
        ("qwen3.6-35b-a3b", "per_expert", 785, 844_640_768),
        ("qwen3.6-35b-a3b", "fused", 19, 844_640_768),
        ("qwen3.5-4b", "fused", 15, None),
    ],
)
def test_released_mtp_heads_are_counted_exactly(preset, experts, tensors, parameters):
    config, layout = QwenConfig.preset(preset), Layout(mtp_experts=experts)
    stored = stored_tensors(config, layout, 1)
    head = {key: tensor for key, tensor in stored.items() if key.startswith("mtp.")}
    assert len(head) == tensors == len(stored) - len(stored_tensors(config, layout))
    assert total(stored) == total(tree_tensors(config, 1))
    if parameters is not None:
        assert total(head) == parameters


def test_shapes_of_the_released_hybrid_model():
    tree = {p: t.shape for p, t in tree_tensors(QwenConfig.preset("qwen3.6-35b-a3b")).items()}
    linear, full = "layers.38.linear_attn.", "layers.39.self_attn."
    assert tree["embed_tokens.weight"] == tree["lm_head.weight"] == (248320, 2048)
    assert tree[f"{full}q_proj.weight"] == (8192, 2048)
    assert tree[f"{full}k_proj.weight"] == tree[f"{full}v_proj.weight"] == (512, 2048)
    assert tree[f"{full}o_proj.weight"] == (2048, 4096)
    assert tree[f"{full}q_norm.weight"] == tree[f"{full}k_norm.weight"] == (256,)
    assert tree[f"{linear}in_proj_qkv.weight"] == (8192, 2048)
    assert tree[f"{linear}in_proj_z.weight"] == (4096, 2048)
    assert tree[f"{linear}in_proj_b.weight"] == tree[f"{linear}in_proj_a.weight"] == (32, 2048)
    assert tree[f"{linear}conv1d.weight"] == (8192, 1, 4)
    assert tree[f"{linear}A_log"] == tree[f"{linear}dt_bias"] == (32,)
    assert tree[f"{linear}norm.weight"] == (128,)
    assert tree[f"{linear}out_proj.weight"] == (2048, 4096)
    assert tree["layers.0.mlp.gate.weight"] == (256, 2048)
    assert tree["layers.0.mlp.experts.gate_up_proj"] == (256, 1024, 2048)
    assert tree["layers.0.mlp.experts.down_proj"] == (256, 2048, 512)
    assert tree["layers.0.mlp.shared_expert.down_proj.weight"] == (2048, 512)
    assert tree["layers.0.mlp.shared_expert_gate.weight"] == (1, 2048)


def test_interleaved_shapes_of_the_released_next_model():
    stored = stored_tensors(
        QwenConfig.preset("qwen3-next-80b-a3b"), Layout(linear_projections="interleaved")
    )
    assert stored["model.layers.0.linear_attn.in_proj_qkvz.weight"].shape == (12288, 2048)
    assert stored["model.layers.0.linear_attn.in_proj_ba.weight"].shape == (64, 2048)


def test_every_row_is_stored_once(family):
    for layout in LAYOUTS:
        tree = {p: np.zeros(t.shape, np.int8) for p, t in tree_tensors(family).items()}
        for tensor in stored_tensors(family, layout).values():
            filled = np.zeros(tensor.shape, np.int8)
            for piece in tensor.pieces:
                counted = np.zeros_like(tree[piece.path])
                piece.gather(counted, np.ones(tensor.shape, np.int8))
                tree[piece.path] += counted
                part = np.zeros_like(filled)
                piece.scatter(part, np.ones_like(counted))
                filled += part
            assert (filled == 1).all(), tensor.key
        assert all((array == 1).all() for array in tree.values())


def test_every_key_leads_back_to_its_path(family):
    for prefix, head_prefix in itertools.product(PREFIXES, HEAD_PREFIXES):
        stored = stored_tensors(family, Layout(prefix, head_prefix))
        spell = speller(prefix, head_prefix)
        paths = [parse_key(key).path for key in stored]
        assert all(parse_key(key).kind == "text" for key in stored)
        assert Counter(paths) == Counter(tree_tensors(family).keys())
        assert [spell(path) for path in paths] == list(stored)


def test_tied_models_have_no_head(tiny):
    for model_type in ("qwen2_moe", "qwen3_moe", "qwen3_next"):
        assert "lm_head.weight" not in tree_tensors(tiny(model_type, tie_word_embeddings=True))
        assert "lm_head.weight" in tree_tensors(tiny(model_type))


def test_biases_norms_and_gates_follow_the_model_type(tiny):
    def attention(model_type, **changes):
        tree = tree_tensors(tiny(model_type, **changes))
        place = "layers.3.self_attn."
        return {path.removeprefix(place) for path in tree if path.startswith(place)}

    projections = {f"{name}_proj.weight" for name in "qkvo"}
    biases = {f"{name}_proj.bias" for name in "qkv"}
    norms = {"q_norm.weight", "k_norm.weight"}
    assert attention("qwen2") == projections | biases
    assert attention("qwen2_moe") == projections | biases
    assert attention("qwen2_moe", qkv_bias=False) == projections
    assert attention("qwen3_moe") == projections | norms
    assert attention("qwen3") == projections | norms | biases | {"o_proj.bias"}


def test_dense_layers_of_sparse_models(tiny):
    tree = tree_tensors(tiny("qwen2_moe"))
    assert "layers.1.mlp.gate_proj.weight" in tree
    assert "layers.1.mlp.gate.weight" not in tree
    assert "layers.0.mlp.experts.down_proj" in tree
    assert "layers.0.mlp.gate_proj.weight" not in tree


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        ("model.language_model.layers.0.mlp.up_proj.weight", "text"),
        ("lm_head.weight", "text"),
        ("language_model.lm_head.weight", "text"),
        ("model.lm_head.weight", "unknown"),
        ("layers.0.mlp.up_proj.weight", "unknown"),
        ("model.model.norm.weight", "unknown"),
        ("thinker.model.norm.weight", "unknown"),
        ("language_model.norm.weight", "unknown"),
        ("mtp.fc.weight", "mtp"),
        ("model.mtp.layers.0.mlp.experts.0.up_proj.weight", "mtp"),
        ("model.visual.pos_embed.weight", "visual"),
        ("visual.blocks.0.norm1.bias", "visual"),
        ("vision_tower.blocks.0.norm1.bias", "visual"),
        ("model.language_model.visual.merger.norm.weight", "visual"),
        ("model.visually.weight", "text"),
        ("model.layers.0.self_attn.rotary_emb.inv_freq", "rotary"),
        ("", "unknown"),
        ("model", "unknown"),
        ("model.", "text"),
    ],
)
def test_keys_are_told_apart_by_whole_segments(key, kind):
    assert parse_key(key).kind == kind
