"""Both spellings of rotary parameters resolve to the same values, in transformers' order."""

import pytest

from qwen_jax.config import QwenConfig, RopeParameters
from qwen_jax.errors import ConfigError


def rope(model_type="qwen3_5", **fields):
    return QwenConfig.from_hf({"model_type": model_type} | fields).rope_parameters


def nested(**fields):
    values = {"model_type": "qwen3_5", "text_config": {"model_type": "qwen3_5_text"} | fields}
    return QwenConfig.from_hf(values).rope_parameters


@pytest.mark.parametrize("read", [rope, nested])
def test_every_spelling_of_base_and_fraction_is_the_same(read):
    expected = RopeParameters(rope_theta=5e6, partial_rotary_factor=0.5, mrope_section=(11, 11, 10))
    inside = {"rope_theta": 5e6, "partial_rotary_factor": 0.5}
    assert read(**inside) == expected
    assert read(**inside, rope_scaling=None) == expected
    assert read(**inside, rope_parameters=None) == expected
    assert read(**inside, rope_scaling={}, rope_parameters={}) == expected
    assert read(rope_parameters=inside) == expected
    assert read(rope_parameters=inside | {"rope_type": "default"}) == expected
    assert read(rope_scaling=inside | {"type": "default"}) == expected
    assert read(rope_theta=5000000, rope_parameters={"partial_rotary_factor": 0.5}) == expected
    assert read(partial_rotary_factor=0.5, rope_parameters={"rope_theta": 5000000}) == expected


@pytest.mark.parametrize(
    ("model_type", "dim"),
    [("qwen3_next", 64), ("qwen3_5", 64), ("qwen3_5_moe", 64), ("qwen3", 128), ("qwen3_moe", 64)],
)
def test_the_rotary_span_of_each_type(model_type, dim):
    assert QwenConfig.from_hf({"model_type": model_type, "rope_theta": 1e6}).rotary_dim == dim


def test_a_value_inside_wins_over_one_beside_with_a_warning():
    inside = {"rope_theta": 5e6, "partial_rotary_factor": 0.5}
    with pytest.warns(UserWarning, match=r"partial_rotary_factor 0\.5 .* is used.* 0\.25"):
        result = rope(rope_parameters=inside, partial_rotary_factor=0.25)
    assert result.partial_rotary_factor == 0.5
    with pytest.warns(UserWarning, match="rope_theta 5000000.0 .* is used.* 1000"):
        assert rope(rope_parameters=inside, rope_theta=1000).rope_theta == 5e6


def test_a_missing_base_is_10000_with_a_warning():
    for fields in ({}, {"rope_parameters": {"rope_type": "default"}}, {"rope_theta": None}):
        with pytest.warns(UserWarning, match="no rope_theta is given: 10000 is used"):
            assert rope(**fields).rope_theta == 10000.0


def test_rope_scaling_replaces_rope_parameters():
    old = {"type": "linear", "factor": 2}
    new = {"rope_type": "default", "rope_theta": 5e6}
    with pytest.warns(UserWarning) as caught:
        result = rope(rope_scaling=old, rope_parameters=new)
    assert (result.rope_type, result.factor, result.rope_theta) == ("linear", 2.0, 10000.0)
    messages = " ".join(str(warning.message) for warning in caught)
    assert "rope_scaling replaces" in messages
    assert "no rope_theta" in messages


YARN = {"factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_yarn_under_both_keys_and_both_names(key):
    fields = {"max_position_embeddings": 131072}
    old = rope("qwen3", rope_theta=1e6, rope_scaling=YARN | {key: "yarn"}, **fields)
    new = rope("qwen3", rope_parameters=YARN | {key: "yarn", "rope_theta": 1e6}, **fields)
    assert old == new
    assert (old.rope_type, old.factor, old.original_max_position_embeddings) == (
        "yarn",
        4.0,
        32768,
    )
    assert (old.beta_fast, old.beta_slow, old.truncate) == (32.0, 1.0, True)
    assert old.attention_factor is old.mscale is old.mscale_all_dim is None


def test_yarn_inside_a_composite_file_is_read():
    block = YARN | {"rope_type": "yarn", "rope_theta": 1e7, "mscale": 1.0, "mscale_all_dim": 1}
    fields = {"max_position_embeddings": 131072, "rope_parameters": block}
    assert nested(**fields) == rope(**fields)
    assert (nested(**fields).factor, nested(**fields).mscale_all_dim) == (4.0, 1.0)


def test_rotary_fields_beside_the_text_config_are_not_used():
    values = {
        "model_type": "qwen3_5",
        "text_config": {"rope_theta": 1e7},
        "rope_scaling": YARN | {"rope_type": "yarn"},
    }
    with pytest.warns(UserWarning, match="rope_scaling.* beside text_config has no effect"):
        assert QwenConfig.from_hf(values).rope_parameters.rope_type == "default"


def test_the_given_yarn_factor_is_kept_where_the_lengths_disagree():
    with pytest.warns(UserWarning, match=r"yarn factor 4\.0 is used.* 40960 / 32768 = 1\.25"):
        result = rope(
            "qwen3",
            rope_theta=1e6,
            rope_scaling=YARN | {"type": "yarn"},
            max_position_embeddings=40960,
        )
    assert result.factor == 4.0


def test_the_documented_extension_of_released_models_raises_no_warning():
    block = {
        "rope_type": "yarn",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "factor": 4.0,
        "original_max_position_embeddings": 262144,
        "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
    }
    result = nested(rope_parameters=block, max_position_embeddings=262144)
    assert (result.factor, result.original_max_position_embeddings) == (4.0, 262144)


def test_missing_yarn_numbers():
    lengths = {"max_position_embeddings": 65536, "rope_theta": 1e6}
    result = rope("qwen3", rope_scaling={"type": "yarn", "factor": 2}, **lengths)
    assert (result.factor, result.original_max_position_embeddings) == (2.0, 65536)
    original = {"type": "yarn", "original_max_position_embeddings": 16384}
    with pytest.warns(UserWarning, match="yarn without factor: 65536 / 16384 = 4 is used"):
        assert rope("qwen3", rope_scaling=original, **lengths).factor == 4.0
    with pytest.raises(ConfigError, match=r"rope_parameters\.factor is null or missing"):
        rope("qwen3", rope_scaling={"type": "yarn"}, **lengths)


def test_keys_without_effect_are_named():
    with pytest.warns(UserWarning, match=r"\['factor'\] have no effect with rope_type 'default'"):
        assert rope("qwen3", rope_theta=1e6, rope_scaling={"factor": 4.0}).factor == 1.0
    with pytest.warns(UserWarning, match="legacy key type says 'linear'"):
        block = YARN | {"rope_type": "yarn", "type": "linear"}
        assert rope("qwen3", rope_theta=1e6, rope_scaling=block).rope_type == "yarn"


def test_a_fraction_that_transformers_ignores_is_used_with_a_warning():
    with pytest.warns(UserWarning, match="transformers rotates the whole head of qwen3"):
        config = QwenConfig.from_hf(
            {"model_type": "qwen3", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
        )
    assert config.rotary_dim == 32


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "rope_type is 'dynamic'; accepted: default, lin"),
        ({"rope_type": "longrope"}, "rope_type is 'longrope'"),
        ({"rope_type": ["yarn"]}, "rope_type is"),
        ({"rope_type": "linear"}, "factor is null or missing"),
        ({"rope_type": "linear", "factor": 0}, "factor is 0; accepted: a number above 0"),
        ({"rope_type": "yarn", "factor": "4"}, "factor is '4'"),
        ({"rope_type": "yarn", "factor": True}, "factor is True"),
        ({"rope_type": "yarn", "factor": float("inf")}, "factor is inf"),
        ({"rope_type": "yarn", "factor": 2, "attention_factor": -1}, "attention_factor is -1"),
        ({"rope_type": "yarn", "factor": 2, "beta_fast": 0.5}, "beta_fast is 0.5; .* above beta"),
        ({"rope_type": "yarn", "factor": 2, "truncate": 1}, "truncate is 1"),
        ({"rope_theta": 0}, "rope_theta is 0"),
        ({"rope_theta": "1e6"}, "rope_theta is '1e6'"),
        ({"partial_rotary_factor": 0}, "partial_rotary_factor is 0"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5"),
        ({"mrope_section": [11, 11]}, "mrope_section"),
        ({"full_attention": {"rope_theta": 1e6}}, "rope_parameters is .* one flat object"),
        ("yarn", "rope_parameters is 'yarn'; accepted: an object or null"),
    ],
)
def test_refusals(block, message):
    if isinstance(block, dict):
        block = {"rope_theta": 1e6} | block
    with pytest.raises(ConfigError, match=message):
        rope("qwen3", rope_parameters=block)
