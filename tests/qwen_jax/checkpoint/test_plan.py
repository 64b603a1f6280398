"""Every layout, prefix and grouping that is accepted gives the same tree."""

from __future__ import annotations

import warnings

import ml_dtypes
import numpy as np
import pytest

from qwen_jax.checkpoint.assemble import assemble, runs, stored_dtype
from qwen_jax.checkpoint.keys import PREFIXES
from qwen_jax.checkpoint.mapping import Layout
from qwen_jax.checkpoint.plan import plan_load
from qwen_jax.checkpoint.safetensors_io import open_folder
from qwen_jax.checkpoint.tensors import tree_tensors
from qwen_jax.errors import CheckpointError

EXPERTS = "model.language_model.layers.0.mlp.experts."
BF16 = ml_dtypes.bfloat16


def holds(plan, tree):
    paths = [source.path for source in plan.sources]
    assert paths == list(tree_tensors(plan.config, plan.mtp_layers))
    for source in plan.sources:
        array = assemble(plan.folder, source, np.dtype(np.float32))
        np.testing.assert_array_equal(array, tree[source.path], err_msg=source.path)


@pytest.mark.parametrize("experts", ["fused", "per_expert"])
@pytest.mark.parametrize("linear", ["split", "interleaved"])
@pytest.mark.parametrize("shared", ["split", "merged"])
def test_every_layout_gives_the_same_tree(
    family, random_tree, stored, planned, experts, linear, shared
):
    layout = Layout("model.", "", experts, linear, shared)
    tree = random_tree(family)
    plan = planned(family, stored(family, tree, layout), shards=2)
    holds(plan, tree)
    assert plan.nbytes == plan.folder.nbytes
    assert plan.config == family


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("head", ["", "language_model."])
def test_every_prefix_gives_the_same_tree(moe, stored, planned, prefix, head):
    config, tree, _ = moe
    holds(planned(config, stored(config, tree, Layout(prefix, head))), tree)


def test_mixed_prefixes_resolve_when_each_tensor_is_there_once(moe, planned):
    config, tree, arrays = moe
    mixed = {
        key.replace("model.language_model.", "model.") if "layers.2." in key else key: array
        for key, array in arrays.items()
    }
    holds(planned(config, mixed), tree)


def test_layouts_may_differ_from_layer_to_layer(moe, stored, planned):
    config, tree, arrays = moe
    split = stored(config, tree, Layout("model.language_model.", experts="per_expert"))
    mixed = {k: a for k, a in arrays.items() if not k.startswith(EXPERTS)}
    mixed |= {k: a for k, a in split.items() if k.startswith(EXPERTS)}
    holds(planned(config, mixed), tree)


@pytest.mark.parametrize("mtp", ["none", "fused", "per_expert"])
def test_mtp_is_skipped_whatever_its_layout(moe, planned, mtp):
    config, tree, arrays = moe
    place = "mtp.layers.0.mlp.experts."
    extra = {
        "none": [],
        "fused": ["mtp.fc.weight", f"{place}gate_up_proj", f"{place}down_proj"],
        "per_expert": ["mtp.fc.weight", f"{place}0.gate_proj.weight", f"{place}7.up_proj.weight"],
    }[mtp]
    plan = planned(config, arrays | {key: np.ones(2, BF16) for key in extra})
    holds(plan, tree)
    assert plan.skipped == ({"mtp": 3} if extra else {})
    assert plan.nbytes == plan.folder.nbytes - 4 * len(extra)


@pytest.mark.parametrize("experts", ["fused", "per_expert"])
@pytest.mark.parametrize("mtp_experts", ["fused", "per_expert"])
def test_mtp_belongs_to_the_tree_when_asked_for(
    moe, random_tree, stored, write_folder, experts, mtp_experts
):
    config, _, _ = moe
    tree = random_tree(config, 1)
    layout = Layout("model.language_model.", experts=experts, mtp_experts=mtp_experts)
    arrays = stored(config, tree, layout, 1)
    plan = plan_load(open_folder(write_folder(arrays)), config, mtp=True)
    holds(plan, tree)
    assert (plan.mtp_layers, plan.skipped, plan.layout) == (1, {}, layout)


def test_a_folder_without_mtp_has_none_even_if_asked_for(moe, write_folder):
    config, tree, arrays = moe
    plan = plan_load(open_folder(write_folder(arrays)), config, mtp=True)
    holds(plan, tree)
    assert plan.mtp_layers == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mtp.fc.weight": None}, r"missing \(1\):\n    mtp.fc.weight"),
        ({"mtp.layers.0.mlp.gate.weight": None}, "missing .*\n    mtp.layers.0.mlp.gate.weight"),
        ({"mtp.layers.1.mlp.gate.weight": np.ones((3, 16), BF16)}, "unused"),
        ({"mtp.layers.999999999.fc": np.ones(3, BF16)}, "unused"),
        ({"mtp.fc.weight": np.ones((16, 16), BF16)}, "misshapen"),
    ],
)
def test_an_mtp_head_that_does_not_fit_is_refused(
    moe, random_tree, stored, write_folder, change, message
):
    config, _, _ = moe
    arrays = stored(config, random_tree(config, 1), Layout(), 1) | change
    arrays = {key: array for key, array in arrays.items() if array is not None}
    folder = open_folder(write_folder(arrays))
    with pytest.raises(CheckpointError, match=message):
        plan_load(folder, config, mtp=True)


def test_runs_of_rows_join_to_the_whole(family, random_tree, stored, planned):
    for layout in (Layout(), Layout("model.", "", "per_expert", "interleaved", "merged")):
        tree = random_tree(family)
        plan = planned(family, stored(family, tree, layout), name=f"of {layout.experts}")
        for source in plan.sources:
            for limit in (1, 100, 1 << 20):
                pieces = runs(plan.folder, source, limit)
                rows = [assemble(plan.folder, source, np.dtype(BF16), run) for run in pieces]
                np.testing.assert_array_equal(np.concatenate(rows), tree[source.path])


def test_the_dtype_of_parts_that_differ_holds_them_all(moe, stored, planned):
    config, tree, _ = moe
    arrays = stored(config, tree, Layout(experts="per_expert"))
    place = "model.layers.0.mlp.experts.1."
    arrays[f"{place}up_proj.weight"] = arrays[f"{place}up_proj.weight"].astype(np.float16)
    plan = planned(config, arrays)
    dtypes = {source.path: stored_dtype(plan.folder, source).name for source in plan.sources}
    assert dtypes["layers.0.mlp.experts.gate_up_proj"] == "float32"
    assert dtypes["layers.0.mlp.experts.down_proj"] == "bfloat16"
    holds(plan, tree)


def test_vision_and_rotary_buffers_are_skipped_and_counted(moe, planned):
    config, tree, arrays = moe
    extra = [
        "model.visual.blocks.0.attn.qkv.weight",
        "visual.pos_embed.weight",
        "model.language_model.layers.3.self_attn.rotary_emb.inv_freq",
    ]
    plan = planned(config, arrays | {key: np.ones(2, np.float64) for key in extra})
    holds(plan, tree)
    assert plan.skipped == {"visual": 2, "rotary": 1}
    assert len(plan.notes) == 2
    assert "skipped 2 visual tensors" in plan.notes


def test_notes_of_the_folder_are_passed_on(moe, write_folder):
    config, _, arrays = moe
    path = write_folder(arrays)
    (path / "other.safetensors").touch()
    assert "other.safetensors" in plan_load(open_folder(path), config).notes[0]


@pytest.mark.parametrize("model_type", ["qwen2_moe", "qwen3_moe", "qwen3_next"])
def test_tied_model_without_head(tiny, random_tree, stored, planned, model_type):
    config = tiny(model_type, tie_word_embeddings=True)
    tree = random_tree(config)
    plan = planned(config, stored(config, tree, Layout()))
    holds(plan, tree)
    assert plan.config.tie_word_embeddings


@pytest.mark.parametrize("shards", [0, 2])
def test_head_equal_to_the_embedding_is_dropped(tiny, random_tree, stored, planned, shards):
    config = tiny("qwen3_moe", tie_word_embeddings=True)
    tree = random_tree(config)
    arrays = stored(config, tree, Layout())
    arrays["lm_head.weight"] = arrays["model.embed_tokens.weight"].copy()
    plan = planned(config, arrays, shards=shards)
    holds(plan, tree)
    assert plan.config.tie_word_embeddings
    assert plan.skipped == {"tied head": 1}


@pytest.mark.parametrize("change", ["value", "sign of zero", "dtype"])
def test_head_of_its_own_is_used_with_a_warning(tiny, random_tree, stored, planned, change):
    config = tiny("qwen3_moe", tie_word_embeddings=True)
    tree = random_tree(config)
    tree["embed_tokens.weight"][39, 15] = 0.0
    arrays = stored(config, tree, Layout())
    head = arrays["model.embed_tokens.weight"].copy()
    if change == "dtype":
        head = head.astype(np.float32)
    else:
        head[39, 15] = 1.0 if change == "value" else -0.0
    with pytest.warns(UserWarning, match=r"lm_head.weight differs .* head in the file is used"):
        plan = planned(config, {**arrays, "lm_head.weight": head})
    assert not plan.config.tie_word_embeddings
    holds(plan, {**tree, "lm_head.weight": head.astype(np.float32)})


def test_untied_model_uses_its_head_without_a_warning(moe, planned):
    config, tree, arrays = moe
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        holds(planned(config, arrays), tree)


def test_pruned_model_under_the_composite_prefix(tiny, random_tree, stored, planned):
    # A flat configuration announcing an MTP layer that is not there, per-expert float16 tensors
    # under the composite prefix: as an expert-pruned release has them.
    config = tiny("qwen3_5_moe_text", num_experts=2, mtp_num_hidden_layers=1)
    tree = random_tree(config)
    layout = Layout("model.language_model.", experts="per_expert")
    arrays = {k: a.astype(np.float16) for k, a in stored(config, tree, layout).items()}
    holds(planned(config, arrays), tree)
