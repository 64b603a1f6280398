"""Costs computed from configurations, against figures worked out by hand from the released ones."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from qwen_jax import accounting
from qwen_jax.cache import init_cache
from qwen_jax.config import QwenConfig

BF16, F32 = 2, 4


@pytest.fixture(scope="module")
def a3b() -> QwenConfig:
    return QwenConfig.preset("qwen3.6-35b-a3b")


def nbytes(tree: object) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def test_parameters_of_35b_a3b(a3b):
    count = accounting.count_parameters(a3b)
    assert count.total == 34_660_610_688
    assert count.active == 2_946_429_568
    assert count.active_with_embedding == 3_454_988_928


@pytest.mark.parametrize(
    ("part", "total", "active"),
    [
        (".mlp.experts.", 32_212_254_720, 1_006_632_960),
        (".mlp.shared_expert", 125_911_040, 125_911_040),
        (".mlp.gate.", 20_971_520, 20_971_520),
        ("lm_head.", 508_559_360, 508_559_360),
        ("embed_tokens.", 508_559_360, 0),
    ],
)
def test_parameters_of_35b_a3b_by_part(a3b, part, total, active):
    tensors = [tensor for tensor in accounting.tensors(a3b) if part in tensor.path]
    assert sum(tensor.size for tensor in tensors) == total
    assert sum(tensor.size * tensor.active for tensor in tensors) == active


@pytest.mark.parametrize(
    ("name", "total", "active_with_embedding"),
    [
        ("qwen3-30b-a3b", 30.53e9, 3.35e9),
        ("qwen3-235b-a22b", 235.09e9, 22.19e9),
        ("qwen2-57b-a14b", 57.41e9, 14.25e9),
        ("qwen1.5-moe-a2.7b", 14.32e9, 2.69e9),
    ],
)
def test_parameters_of_other_models_as_published(name, total, active_with_embedding):
    count = accounting.count_parameters(QwenConfig.preset(name))
    assert count.total == pytest.approx(total, abs=0.005e9)
    assert count.active_with_embedding == pytest.approx(active_with_embedding, abs=0.005e9)


def test_tied_head_is_counted_once_and_is_active():
    config = QwenConfig.preset("qwen3.5-0.8b")
    count = accounting.count_parameters(config)
    assert config.tie_word_embeddings
    assert count.total == count.active == count.active_with_embedding
    untied = accounting.count_parameters(dataclasses.replace(config, tie_word_embeddings=False))
    table = config.vocab_size * config.hidden_size
    assert untied.total - count.total == table
    assert untied.active == count.active


def test_bytes_of_35b_a3b(a3b):
    # A_log, dt_bias and the delta rule's norm stay float32 in each of the 30 linear layers.
    kept = 30 * (32 + 32 + 128)
    row = a3b.hidden_size * BF16
    assert accounting.weight_bytes(a3b) == 34_660_610_688 * BF16 + kept * (F32 - BF16)
    read = 2_946_429_568 * BF16 + kept * (F32 - BF16) + row
    assert accounting.weight_bytes_per_token(a3b) == read
    assert accounting.kv_bytes_per_token(a3b) == 20_480
    # Codes, two scales, and a share of the block's base, for 2 heads in 10 layers.
    coded = 10 * 2 * (2 * 256 + 2 * F32) + 10 * 2 * 256 * BF16 // 64
    assert accounting.kv_bytes_per_token(a3b, "int8") == coded == 10_560
    assert accounting.delta_bytes_per_sequence(a3b) == 15_728_640 * F32
    short = dataclasses.replace(a3b, mamba_ssm_dtype="bfloat16")
    assert accounting.delta_bytes_per_sequence(short) == 15_728_640 * BF16
    assert accounting.conv_bytes_per_sequence(a3b) == 30 * 8192 * 4 * BF16
    state = 15_728_640 * F32 + 30 * 8192 * 4 * BF16
    assert accounting.state_bytes_per_sequence(a3b) == state
    assert accounting.bytes_per_token(a3b, 1000) == read + 2 * state + 1000 * 20_480


def test_bytes_of_a_step_of_a_batch(a3b):
    one, many = (accounting.bytes_per_step(a3b, rows, 1000) for rows in (1, 32))
    assert sum(one.values()) == accounting.bytes_per_token(a3b, 1000)
    # Eight experts of three matrices a layer; the head is no part of the embedding.
    assert one["experts"] == 40 * 8 * 3 * 512 * 2048 * BF16
    assert one["head"] == 248_320 * 2048 * BF16
    same, per_row = ("other weights", "head"), ("embedding", "keys and values", "recurrent state")
    assert all(many[name] == one[name] for name in same)
    assert all(many[name] == 32 * one[name] for name in per_row)
    # Draws of 8 of 256 experts by 32 rows, simulated.
    rng = np.random.default_rng(0)
    draws = [{e for _ in range(32) for e in rng.permutation(256)[:8]} for _ in range(400)]
    distinct = np.mean([len(each) for each in draws])
    assert accounting.distinct_experts(a3b, 32) == pytest.approx(distinct, rel=0.01)
    assert many["experts"] / one["experts"] == pytest.approx(distinct / 8, rel=0.01)
    coded = accounting.bytes_per_step(a3b, 1, 1000, kv_cache_dtype="int8")
    assert coded["keys and values"] == 1000 * 10_560


def test_bytes_of_a_step_without_experts_and_with_a_window():
    config = QwenConfig.preset("qwen3.5-0.8b")
    parts = accounting.bytes_per_step(config, 4)
    assert parts["experts"] == 0
    # Tied: the table is the head, and its rows are read besides.
    table = config.vocab_size * config.hidden_size * BF16
    assert (parts["head"], parts["embedding"]) == (table, 4 * config.hidden_size * BF16)
    kinds = ("sliding_attention",) * 48
    sliding = dataclasses.replace(
        QwenConfig.preset("qwen3-30b-a3b"), layer_types=kinds, sliding_window=100
    )
    seen = accounting.bytes_per_step(sliding, 1, 1000)["keys and values"]
    assert seen == accounting.kv_bytes_per_token(sliding) * 100


def test_bytes_follow_the_dtype(a3b):
    wide = dataclasses.replace(a3b, dtype="float32")
    assert accounting.weight_bytes(wide) == 34_660_610_688 * F32
    assert accounting.kv_bytes_per_token(wide) == 40_960


def test_operations_of_35b_a3b(a3b):
    alone = accounting.flops_per_token(a3b)
    linear = 30 * 32 * 7 * 128 * 128
    attention = 10 * 4 * 16 * 256
    assert alone == 2 * 2_946_429_568 + linear + attention
    assert accounting.flops_per_token(a3b, 1000) - alone == 1000 * attention


def test_operations_of_a_sliding_layer_stop_growing():
    fields = {
        "model_type": "qwen2",
        "vocab_size": 100,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 32,
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 1,
        "rope_theta": 10000.0,
    }
    config = QwenConfig.from_hf(fields)
    assert config.layer_types == ("full_attention", "sliding_attention")
    grown = accounting.flops_per_token(config, 101) - accounting.flops_per_token(config, 100)
    assert grown == 4 * 32


def test_layer_kinds(a3b):
    assert accounting.layer_kinds(a3b) == {
        "linear_attention + moe": 30,
        "full_attention + moe": 10,
    }
    dense = QwenConfig.preset("qwen3.5-0.8b")
    assert accounting.layer_kinds(dense) == {
        "linear_attention + dense": 18,
        "full_attention + dense": 6,
    }


@pytest.mark.parametrize("dtype", [None, "int8"])
@pytest.mark.parametrize(("batch", "length"), [(1, 1), (1, 64), (3, 65), (2, 1000)])
def test_cache_bytes_are_those_of_a_real_cache(demo_path, batch, length, dtype):
    config = QwenConfig.from_hf(demo_path)
    real = nbytes(init_cache(config, batch, length, kv_cache_dtype=dtype))
    assert accounting.cache_bytes(config, batch, length, dtype) == real


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("name", ["qwen3.6-35b-a3b", "qwen3-30b-a3b"])
def test_largest_context_fits_and_one_block_more_does_not(name, batch):
    config, memory = QwenConfig.preset(name), int(80e9)
    context = accounting.largest_context(config, memory, batch)

    def needed(length: int) -> int:
        return accounting.weight_bytes(config) + accounting.cache_bytes(config, batch, length)

    assert context > 0
    assert needed(context) <= memory < needed(context + 1)


def test_no_context_fits_where_the_weights_do_not(a3b):
    assert accounting.largest_context(a3b, int(24e9)) == 0
