"""Folders matched against configurations: accepted layouts, and all mismatches in one error."""

from __future__ import annotations

import itertools
import re
import warnings

import ml_dtypes
import numpy as np
import pytest

from qwen_jax.checkpoint.keys import PREFIXES
from qwen_jax.checkpoint.mapping import Layout
from qwen_jax.checkpoint.parameters import assemble
from qwen_jax.checkpoint.plan import plan_load
from qwen_jax.checkpoint.safetensors_io import open_folder
from qwen_jax.checkpoint.tensors import tree_tensors
from qwen_jax.errors import CheckpointError

COMPOSITE = Layout("model.language_model.")
EXPERTS = "model.language_model.layers.0.mlp.experts."
BF16 = ml_dtypes.bfloat16


@pytest.fixture
def moe(tiny, random_tree, stored):
    """A tiny hybrid MoE configuration, its tree, and its tensors as released."""
    config = tiny("qwen3_5_moe_text")
    tree = random_tree(config)
    return config, tree, stored(config, tree, COMPOSITE)


@pytest.fixture
def planned(write_folder):
    """Plans a folder of the given arrays."""

    def plan(config, arrays, **options):
        return plan_load(open_folder(write_folder(arrays, **options)), config)

    return plan


@pytest.fixture
def refused(planned):
    """Gives the message with which a folder of the given arrays is refused."""

    def message(config, arrays):
        with pytest.raises(CheckpointError) as caught:
            planned(config, arrays)
        return str(caught.value)

    return message


def kinds(message):
    return {kind: int(n) for kind, n in re.findall(r"^  (\S.*) \((\d+)\):$", message, re.M)}


def holds(plan, tree):
    assert [source.path for source in plan.sources] == list(tree_tensors(plan.config))
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


def test_tensor_under_two_prefixes_is_refused(moe, refused):
    config, _, arrays = moe
    arrays["model.norm.weight"] = arrays["model.language_model.norm.weight"] * 2
    message = refused(config, arrays)
    assert kinds(message) == {"duplicate": 1}
    assert "model.language_model.norm.weight and model.norm.weight" in message


def test_layouts_may_differ_from_layer_to_layer(moe, stored, planned):
    config, tree, arrays = moe
    split = stored(config, tree, Layout("model.language_model.", experts="per_expert"))
    mixed = {k: a for k, a in arrays.items() if not k.startswith(EXPERTS)}
    mixed |= {k: a for k, a in split.items() if k.startswith(EXPERTS)}
    holds(planned(config, mixed), tree)


@pytest.mark.parametrize("tensor", ["gate_proj", "up_proj", "down_proj"])
def test_experts_in_two_layouts_at_once_are_refused(moe, refused, tensor):
    config, _, arrays = moe
    shape = (16, 6) if tensor == "down_proj" else (6, 16)
    arrays[f"{EXPERTS}0.{tensor}.weight"] = np.ones(shape, BF16)
    message = refused(config, arrays)
    assert kinds(message)["ambiguous"] == 1
    fused = "down_proj" if tensor == "down_proj" else "gate_up_proj"
    assert f"{EXPERTS}{fused} and {EXPERTS}0.{tensor}.weight" in message


def test_projections_in_two_layouts_at_once_are_refused(moe, stored, refused):
    config, tree, arrays = moe
    other = stored(config, tree, Layout("model.language_model.", linear_projections="interleaved"))
    key = "model.language_model.layers.0.linear_attn.in_proj_ba.weight"
    assert kinds(refused(config, {**arrays, key: other[key]}))["ambiguous"] == 1


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


@pytest.mark.parametrize(
    "key",
    [
        "model.language_model.layers.2.mlp.shared_expert_gate.weight",
        "model.language_model.layers.3.self_attn.q_norm.weight",
        "model.language_model.norm.weight",
        "lm_head.weight",
    ],
)
def test_each_missing_tensor_is_named(moe, refused, key):
    config, _, arrays = moe
    del arrays[key]
    message = refused(config, arrays)
    assert kinds(message) == {"missing": 1}
    assert key in message


def test_each_key_is_needed(moe, write_folder):
    config, _, arrays = moe
    for number, key in enumerate(arrays):
        rest = {k: a for k, a in arrays.items() if k != key}
        with pytest.raises(CheckpointError, match=re.escape(key)):
            plan_load(open_folder(write_folder(rest, name=str(number))), config)


def test_missing_experts_name_both_layouts(moe, refused):
    config, _, arrays = moe
    rest = {key: array for key, array in arrays.items() if not key.startswith(EXPERTS)}
    message = refused(config, rest)
    assert kinds(message) == {"missing": 2}
    assert f"{EXPERTS}gate_up_proj (or mlp.experts.{{e}}.gate_proj.weight and " in message


def test_all_mismatches_are_in_one_error(moe, refused):
    config, _, arrays = moe
    del arrays["model.language_model.norm.weight"]
    arrays["model.language_model.layers.0.mlp.gate.bias"] = np.ones(3, BF16)
    arrays["extra.weight"] = np.ones(3, BF16)
    arrays["model.language_model.layers.1.mlp.gate.weight"] = np.ones((16, 3), BF16)
    arrays["model.language_model.layers.2.mlp.gate.weight"] = np.ones((3, 16), np.int32)
    arrays["language_model.model.embed_tokens.weight"] = np.ones((40, 16), BF16)
    message = refused(config, arrays)
    assert kinds(message) == {
        "under an unknown prefix": 1,
        "duplicate": 1,
        "missing": 1,
        "misshapen": 1,
        "dtype": 1,
        "unused": 1,
    }
    assert "layers.1.mlp.gate.weight has shape [16, 3], expected [3, 16]" in message
    assert "layers.2.mlp.gate.weight is I32; accepted: BF16, F16, F32" in message


@pytest.mark.parametrize("numbers", [(0, 1, 3), (0, 1, 2, 3), (0, 2, 1, 2**70)])
def test_expert_numbers_with_a_gap_or_surplus_are_refused(
    tiny, random_tree, stored, refused, numbers
):
    config = tiny("qwen3_moe")
    arrays = stored(config, random_tree(config), Layout(experts="per_expert"))
    place = "model.layers.1.mlp.experts."
    kept = {key: array for key, array in arrays.items() if not key.startswith(place)}
    for number, name in itertools.product(numbers, ("gate_proj", "up_proj", "down_proj")):
        kept[f"{place}{number}.{name}.weight"] = arrays[f"{place}0.{name}.weight"]
    message = refused(config, kept)
    gap = set(range(3)) - set(numbers)
    expected = {"unused": 3, "numbers beyond the configuration": 1}
    assert kinds(message) == expected | ({"missing": 3} if gap else {})
    assert f"{place}{max(numbers)}.up_proj.weight" in message
    assert "the configuration has 3" in message
    for number in gap:
        assert f"{place}{number}.up_proj.weight" in message


def test_padded_expert_numbers_are_not_taken_for_others(tiny, random_tree, stored, refused):
    config = tiny("qwen3_moe")
    arrays = stored(config, random_tree(config), Layout(experts="per_expert"))
    key = "model.layers.1.mlp.experts.{}.up_proj.weight"
    arrays[key.format("01")] = arrays.pop(key.format("1"))
    assert kinds(refused(config, arrays)) == {"missing": 1, "unused": 1}


def test_renamed_path_segment_is_refused(moe, refused):
    config, _, arrays = moe
    renamed = {key.replace(".experts.", ".expert_bank."): array for key, array in arrays.items()}
    assert kinds(refused(config, renamed)) == {"missing": 8, "unused": 8}


def test_surplus_layers_are_refused(moe, tiny, refused):
    _, _, arrays = moe
    message = refused(tiny("qwen3_5_moe_text", num_hidden_layers=3), arrays)
    assert "layers up to number 3; the configuration has 3" in message
    assert "missing" not in kinds(message)


def test_long_lists_are_cut_and_counted(tiny, refused):
    message = refused(tiny("qwen3_moe"), {"model.norm.weight": np.ones(16, BF16)})
    assert kinds(message)["missing"] > 20
    assert re.search(r"\.\.\. and \d+ more", message)
    assert len(message.splitlines()) < 30


@pytest.mark.parametrize("model_type", ["qwen2_moe", "qwen3_moe", "qwen3_next"])
def test_tied_model_without_head(tiny, random_tree, stored, planned, model_type):
    config = tiny(model_type, tie_word_embeddings=True)
    tree = random_tree(config)
    plan = planned(config, stored(config, tree, Layout()))
    holds(plan, tree)
    assert plan.config.tie_word_embeddings


def test_untied_model_without_head_is_refused(tiny, random_tree, stored, refused):
    tied = tiny("qwen3_moe", tie_word_embeddings=True)
    arrays = stored(tied, random_tree(tied), Layout())
    message = refused(tiny("qwen3_moe"), arrays)
    assert kinds(message) == {"missing": 1}
    assert "lm_head.weight (the configuration says tie_word_embeddings false)" in message


@pytest.mark.parametrize("shards", [0, 2])
def test_head_equal_to_the_embedding_is_dropped(tiny, random_tree, stored, planned, shards):
    config = tiny("qwen3_moe", tie_word_embeddings=True)
    tree = random_tree(config)
    arrays = stored(config, tree, Layout())
    arrays["lm_head.weight"] = arrays["model.embed_tokens.weight"].copy()
    plan = planned(config, arrays, shards=shards)
    holds(plan, tree)
    assert plan.config.tie_word_embeddings


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
