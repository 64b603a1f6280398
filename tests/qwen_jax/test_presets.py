"""The presets have the sizes published for the models they are named after."""

import pytest

from qwen_jax.config import QwenConfig
from qwen_jax.configuration.presets import PRESET_NAMES
from qwen_jax.errors import ConfigError

NAMES = (
    "qwen3.6-35b-a3b qwen3.5-35b-a3b qwen3.5-122b-a10b qwen3.5-397b-a17b qwen3-next-80b-a3b "
    "qwen3-coder-next qwen3-30b-a3b qwen3-coder-30b-a3b qwen3-235b-a22b qwen2-57b-a14b "
    "qwen1.5-moe-a2.7b qwen3.5-0.8b qwen3.5-2b qwen3.5-4b qwen3.5-9b qwen3.5-27b"
).split()


def attention_parameters(c):
    queries, keys = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    projections = queries * (3 if c.attn_gate else 2) + 2 * keys
    biases = (queries + 2 * keys) * c.qkv_bias
    return projections * c.hidden_size + biases + 2 * c.head_dim * c.qk_norm


def delta_net_parameters(c):
    inputs = c.conv_dim + c.value_dim + 2 * c.linear_num_value_heads
    small = 2 * c.linear_num_value_heads + c.linear_value_head_dim
    convolution = c.conv_dim * c.linear_conv_kernel_dim
    return (inputs + c.value_dim) * c.hidden_size + convolution + small


def feed_forward_parameters(c, layer, experts):
    if not c.is_sparse(layer):
        return 3 * c.hidden_size * c.width("intermediate_size", layer)
    shared = c.width("shared_expert_intermediate_size", layer)
    routed = 3 * c.hidden_size * c.width("moe_intermediate_size", layer) * experts
    gate = c.hidden_size if shared else 0
    return routed + c.hidden_size * c.num_experts + 3 * c.hidden_size * shared + gate


def parameters(c, *, active=False):
    """All text parameters; with `active` those one token uses, without the embedding table."""
    tables = 1 if active or c.tie_word_embeddings else 2
    total = tables * c.vocab_size * c.hidden_size + c.hidden_size
    for layer, kind in enumerate(c.layer_types):
        mixer = delta_net_parameters if kind == "linear_attention" else attention_parameters
        experts = c.num_experts_per_tok if active else c.num_experts
        total += mixer(c) + feed_forward_parameters(c, layer, experts) + 2 * c.hidden_size
    return total


def test_every_released_shape_has_its_name():
    assert sorted(PRESET_NAMES) == sorted(NAMES)


def test_exact_parameter_counts():
    assert parameters(QwenConfig.preset("qwen3-30b-a3b")) == 30_532_122_624
    assert parameters(QwenConfig.preset("qwen3.6-35b-a3b")) == 34_660_610_688
    assert parameters(QwenConfig.preset("qwen3.6-35b-a3b"), active=True) == 2_946_429_568


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("qwen3.5-122b-a10b", 122.11),
        ("qwen3.5-397b-a17b", 396.35),
        ("qwen3-next-80b-a3b", 79.67),
        ("qwen3-235b-a22b", 235.09),
        ("qwen2-57b-a14b", 57.41),
        ("qwen1.5-moe-a2.7b", 14.32),
    ],
)
def test_parameter_counts(name, billions):
    assert round(parameters(QwenConfig.preset(name)) / 1e9, 2) == billions


@pytest.mark.parametrize(
    ("name", "billions"),
    [("qwen3.5-122b-a10b", 9.01), ("qwen3.5-397b-a17b", 16.33)],
)
def test_active_parameter_counts(name, billions):
    assert round(parameters(QwenConfig.preset(name), active=True) / 1e9, 2) == billions


# hidden, layers, full attention layers, query and key heads, head_dim, key and value heads of the
# delta net, dense width, rope_theta, context, tied.
DENSE_AND_OTHERS = {
    "qwen3.5-397b-a17b": (4096, 60, 15, 32, 2, 256, 16, 64, None, 1e7, 262144, False),
    "qwen3.5-122b-a10b": (3072, 48, 12, 32, 2, 256, 16, 64, None, 1e7, 262144, False),
    "qwen3-next-80b-a3b": (2048, 48, 12, 16, 2, 256, 16, 32, 5120, 1e7, 262144, False),
    "qwen3-coder-next": (2048, 48, 12, 16, 2, 256, 16, 32, 5120, 5e6, 262144, False),
    "qwen3-30b-a3b": (2048, 48, 48, 32, 4, 128, 0, 0, 6144, 1e6, 40960, False),
    "qwen3-coder-30b-a3b": (2048, 48, 48, 32, 4, 128, 0, 0, 5472, 1e7, 262144, False),
    "qwen3-235b-a22b": (4096, 94, 94, 64, 4, 128, 0, 0, 12288, 1e6, 40960, False),
    "qwen2-57b-a14b": (3584, 28, 28, 28, 4, 128, 0, 0, 18944, 1e6, 131072, False),
    "qwen1.5-moe-a2.7b": (2048, 24, 24, 16, 16, 128, 0, 0, 5632, 1e6, 32768, False),
    "qwen3.5-0.8b": (1024, 24, 6, 8, 2, 256, 16, 16, 3584, 1e7, 262144, True),
    "qwen3.5-2b": (2048, 24, 6, 8, 2, 256, 16, 16, 6144, 1e7, 262144, True),
    "qwen3.5-4b": (2560, 32, 8, 16, 4, 256, 16, 32, 9216, 1e7, 262144, True),
    "qwen3.5-9b": (4096, 32, 8, 16, 4, 256, 16, 32, 12288, 1e7, 262144, False),
    "qwen3.5-27b": (5120, 64, 16, 24, 4, 256, 16, 48, 17408, 1e7, 262144, False),
}


@pytest.mark.parametrize("name", DENSE_AND_OTHERS)
def test_released_values(name):
    c = QwenConfig.preset(name)
    assert DENSE_AND_OTHERS[name] == (
        c.hidden_size,
        c.num_hidden_layers,
        c.layer_types.count("full_attention"),
        c.num_attention_heads,
        c.num_key_value_heads,
        c.head_dim,
        c.linear_num_key_heads,
        c.linear_num_value_heads,
        c.intermediate_size,
        c.rope_parameters.rope_theta,
        c.max_position_embeddings,
        c.tie_word_embeddings,
    )


@pytest.mark.parametrize(
    ("name", "experts"),
    [
        ("qwen3.6-35b-a3b", (256, 8, 512, 512, True)),
        ("qwen3.5-397b-a17b", (512, 10, 1024, 1024, True)),
        ("qwen3.5-122b-a10b", (256, 8, 1024, 1024, True)),
        ("qwen3-next-80b-a3b", (512, 10, 512, 512, True)),
        ("qwen3-coder-next", (512, 10, 512, 512, True)),
        ("qwen3-30b-a3b", (128, 8, 768, 0, True)),
        ("qwen3-235b-a22b", (128, 8, 1536, 0, True)),
        ("qwen2-57b-a14b", (64, 8, 2560, 20480, False)),
        ("qwen1.5-moe-a2.7b", (60, 4, 1408, 5632, False)),
    ],
)
def test_released_experts(name, experts):
    c = QwenConfig.preset(name)
    assert experts == (
        c.num_experts,
        c.num_experts_per_tok,
        c.moe_intermediate_size,
        c.shared_expert_intermediate_size,
        c.norm_topk_prob,
    )


@pytest.mark.parametrize("name", NAMES)
def test_presets_write_and_read_back(name):
    config = QwenConfig.preset(name)
    assert QwenConfig.from_hf(config.to_hf()) == config
    assert config.dtype == "bfloat16"
    assert config.eos_token_id


def test_end_tokens_and_announced_layers():
    newest, older = QwenConfig.preset("qwen3.6-35b-a3b"), QwenConfig.preset("qwen3.5-35b-a3b")
    assert (newest.bos_token_id, older.bos_token_id) == (248044, None)
    assert newest.eos_token_id == older.eos_token_id == (248044,)
    assert newest.mtp_num_hidden_layers == 1
    assert QwenConfig.preset("qwen3-30b-a3b").eos_token_id == (151645,)
    assert QwenConfig.preset("qwen3-coder-30b-a3b").router_aux_loss_coef == 0.0


def test_an_unknown_name_is_refused_with_the_list():
    with pytest.raises(ConfigError, match=r"no preset 'qwen9'.*qwen3\.6-35b-a3b.*qwen3\.5-0\.8b"):
        QwenConfig.preset("qwen9")
    assert QwenConfig.preset("Qwen3-30B-A3B") == QwenConfig.preset("qwen3-30b-a3b")
