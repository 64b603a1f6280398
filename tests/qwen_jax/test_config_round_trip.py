"""`QwenConfig` as a value: written, read again and varied; and fields with several spellings."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen_jax.config import QwenConfig, RopeParameters
from qwen_jax.errors import ConfigError

GOLDEN = sorted((Path(__file__).parents[1] / "golden").glob("qwen*.json"))
THETA = {"rope_theta": 1e6}
ARCHITECTURES = {
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
}
MOE = ("qwen2_moe", "qwen3_moe", "qwen3_next")
ALL_MOE = (*MOE, "qwen3_5_moe_text")


def read(model_type, **fields):
    return QwenConfig.from_hf({"model_type": model_type} | THETA | fields)


@st.composite
def files(draw):
    """A valid `config.json` of any type."""
    model_type = draw(st.sampled_from(sorted(ARCHITECTURES)))
    layers = draw(st.integers(1, 6))
    heads = draw(st.integers(1, 3))

    def widths(least):
        one = st.integers(least, 99)
        return draw(one | st.lists(one, min_size=layers, max_size=layers))

    fields = {
        "num_hidden_layers": layers,
        "num_key_value_heads": heads,
        "num_attention_heads": heads * draw(st.integers(1, 3)),
        "head_dim": draw(st.sampled_from([8, 16, 40])),
        "tie_word_embeddings": draw(st.booleans()),
        "attention_bias": draw(st.booleans()),
        "qkv_bias": draw(st.booleans()),
        "eos_token_id": draw(st.none() | st.integers(0, 9) | st.lists(st.integers(0, 9))),
        "pad_token_id": draw(st.none() | st.integers(0, 9)),
        "torch_dtype": draw(st.sampled_from(["float32", "bfloat16", "torch.bfloat16"])),
        "rope_scaling": draw(
            st.sampled_from(
                [
                    None,
                    {"rope_type": "linear", "factor": 2},
                    {"type": "yarn", "factor": 4.0, "attention_factor": 1.5, "truncate": False},
                ]
            )
        ),
        "intermediate_size": widths(1),
    }
    if model_type in ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe"):
        fields["use_sliding_window"] = draw(st.booleans())
        fields["sliding_window"] = draw(st.none() | st.integers(1, 9))
        fields["max_window_layers"] = draw(st.integers(0, 6))
    if model_type in ALL_MOE:
        fields["num_experts"] = draw(st.integers(8, 16))
        fields["num_experts_per_tok"] = draw(st.integers(1, 8))
        fields["moe_intermediate_size"] = widths(1)
    if model_type in ALL_MOE and model_type != "qwen3_moe":
        fields["shared_expert_intermediate_size"] = widths(0)
    if model_type in MOE:
        fields["mlp_only_layers"] = draw(st.none() | st.lists(st.integers(0, layers - 1)))
        fields["decoder_sparse_step"] = draw(st.integers(1, 3))
        fields["norm_topk_prob"] = draw(st.booleans())
    return {"model_type": model_type} | THETA | fields


@given(files())
def test_what_is_written_reads_back_equal(values):
    config = QwenConfig.from_hf(values)
    written = json.loads(json.dumps(config.to_hf()))
    assert QwenConfig.from_hf(written) == config
    assert hash(QwenConfig.from_hf(written)) == hash(config)
    assert written["model_type"] == values["model_type"]
    assert written["architectures"] == [ARCHITECTURES[values["model_type"]]]
    assert len(written["layer_types"]) == values["num_hidden_layers"]


def test_the_written_file_uses_present_spellings():
    config = read("qwen3_5_moe", num_hidden_layers=4, eos_token_id=[7, 5], torch_dtype="float32")
    written = config.to_hf()
    assert written["rope_parameters"] == {
        "rope_type": "default",
        "rope_theta": 1e6,
        "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
    }
    assert written["dtype"] == "float32"
    assert written["eos_token_id"] == [7, 5]
    assert not {"text_config", "torch_dtype", "rope_scaling", "intermediate_size"} & set(written)


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
@pytest.mark.filterwarnings("ignore:.*(yarn factor|float16):UserWarning")
def test_layers_are_those_transformers_builds(path):
    golden = json.loads(path.read_text())
    config = QwenConfig.from_hf(golden["config"])
    layers = range(config.num_hidden_layers)
    assert list(config.layer_types) == golden["layer_types"]
    assert [i for i in layers if config.is_sparse(i)] == golden["moe_layers"]
    assert config.zero_centred_norm is golden["zero_centred_norm"]


def test_a_config_is_frozen_and_checked_when_varied():
    config = read("qwen3")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.hidden_size = 1  # pyright: ignore[reportAttributeAccessIssue]
    assert dataclasses.replace(config, hidden_size=64) != config
    with pytest.raises(ConfigError, match="num_attention_heads is 30; accepted: a multiple"):
        dataclasses.replace(config, num_attention_heads=30)
    with pytest.raises(ConfigError, match="num_experts is 4; accepted: 0 with model_type 'qwen3'"):
        dataclasses.replace(config, num_experts=4)


def test_the_given_dict_is_left_as_it_was():
    values = {"model_type": "qwen3", "rope_scaling": {"type": "yarn", "factor": 2.0}} | THETA
    before = json.dumps(values)
    QwenConfig.from_hf(values)
    assert json.dumps(values) == before


def test_reading_a_config_loads_no_jax():
    program = (
        "import sys, qwen_jax.config; sys.exit('jax' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize("model_type", ["qwen2_moe", "qwen3_moe", "qwen3_5_moe"])
def test_both_names_of_the_number_of_experts(model_type):
    assert read(model_type, num_local_experts=16).num_experts == 16
    assert read(model_type, num_experts=16, num_local_experts=16).num_experts == 16


def test_head_dim_is_read_or_follows_from_the_hidden_size():
    assert read("qwen3_moe", head_dim=128).head_dim == 128
    assert read("qwen3_moe", head_dim=None).head_dim == 64
    assert (
        read("qwen2", hidden_size=1024, num_attention_heads=8, num_key_value_heads=8).head_dim
        == 128
    )
    assert read("qwen2", head_dim=64).head_dim == 64


def test_null_key_value_heads_are_as_many_as_query_heads():
    assert read("qwen2", num_key_value_heads=None, num_attention_heads=8).num_key_value_heads == 8


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("prefix", ["", "torch."])
def test_spellings_of_the_dtype(name, prefix):
    assert read("qwen3", **{name: f"{prefix}float32"}).dtype == "float32"
    assert read("qwen3", **{name: f"{prefix}bfloat16"}).dtype == "bfloat16"
    with pytest.warns(UserWarning, match="float16 is read as bfloat16"):
        assert read("qwen3", **{name: f"{prefix}float16"}).dtype == "bfloat16"


def test_the_dtype_may_stand_at_either_level():
    inner = {"model_type": "qwen3_5", "text_config": THETA | {"dtype": "float32"}}
    outer = {"model_type": "qwen3_5", "text_config": THETA, "torch_dtype": "float32"}
    assert QwenConfig.from_hf(inner).dtype == QwenConfig.from_hf(outer).dtype == "float32"
    assert read("qwen3", dtype=None).dtype == read("qwen3").dtype == "bfloat16"


@pytest.mark.parametrize(
    ("value", "ids"), [(5, (5,)), ([5, 7], (5, 7)), (None, ()), ([], ()), ([7, 7], (7,))]
)
def test_end_tokens_are_an_int_a_list_or_null(value, ids):
    assert read("qwen3", eos_token_id=value).eos_token_id == ids


def test_end_tokens_of_both_levels_count():
    text = THETA | {"eos_token_id": 5, "bos_token_id": None}
    values = {
        "model_type": "qwen3_5",
        "text_config": text,
        "eos_token_id": [7, 5],
        "bos_token_id": 3,
    }
    config = QwenConfig.from_hf(values)
    assert (config.eos_token_id, config.bos_token_id, config.pad_token_id) == ((5, 7), 3, None)


def test_widths_may_differ_from_layer_to_layer():
    config = read(
        "qwen2_moe",
        num_hidden_layers=3,
        mlp_only_layers=[0],
        intermediate_size=[30, 40, 50],
        moe_intermediate_size=[0, 8, 16],
        shared_expert_intermediate_size=[0, 0, 24],
    )
    assert [config.width("intermediate_size", i) for i in range(3)] == [30, 40, 50]
    assert [config.width("moe_intermediate_size", i) for i in range(3)] == [0, 8, 16]
    assert [config.width("shared_expert_intermediate_size", i) for i in range(3)] == [0, 0, 24]
    even = read("qwen3_5_moe", num_hidden_layers=2, moe_intermediate_size=8)
    assert [even.width("moe_intermediate_size", i) for i in range(2)] == [8, 8]
    assert even.width("intermediate_size", 0) == 0


def test_multi_token_prediction_layers_have_two_names():
    assert read("qwen3_next", num_nextn_predict_layers=1).mtp_num_hidden_layers == 1
    assert read("qwen3_5", mtp_num_hidden_layers=1).mtp_num_hidden_layers == 1
    assert read("qwen3_5").mtp_num_hidden_layers == 0


def test_fields_without_influence_are_ignored():
    extra = {
        "initializer_range": 0.02,
        "quantization_config": {"quant_method": "gptq"},
        "use_cache": True,
        "output_router_logits": False,
        "max_window_layers": 4,
        "something_new": {"a": 1},
    }
    assert read("qwen3_next", **extra) == read("qwen3_next")


def test_the_dtype_of_the_recurrent_state():
    assert read("qwen3_5").mamba_ssm_dtype == read("qwen2").mamba_ssm_dtype == "float32"
    assert read("qwen3_5", mamba_ssm_dtype=None).mamba_ssm_dtype == "float32"
    with pytest.warns(match="mamba_ssm_dtype bfloat16 is used; transformers keeps float32"):
        config = read("qwen3_5", mamba_ssm_dtype="bfloat16")
    assert config.mamba_ssm_dtype == config.to_hf()["mamba_ssm_dtype"] == "bfloat16"
    for refused in ("float16", 16):
        with pytest.raises(ConfigError, match=f"mamba_ssm_dtype is {refused!r}; accepted: float32"):
            read("qwen3_next", mamba_ssm_dtype=refused)


def test_rope_parameters_need_the_numbers_of_their_type():
    assert RopeParameters(rope_type="linear", factor=2.0).factor == 2.0
    with pytest.raises(
        ConfigError, match=r"factor is 2\.0; accepted: 1\.0 with rope_type 'default'"
    ):
        RopeParameters(factor=2.0)
    with pytest.raises(ConfigError, match="original_max_position_embeddings"):
        RopeParameters(rope_type="yarn", factor=2.0)
