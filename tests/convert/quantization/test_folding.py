"""Factors of inputs in rows of another matrix: what a model computes stays the same."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from convert.calibrate import advance, at
from convert.layer import quantise_layer
from convert.quantization.choice import choose
from convert.quantization.folding import fold_solved, fold_weights, folded_factors, folds
from qwen_jax import CausalLM, QwenConfig
from qwen_jax.model import parameter_shapes
from qwen_jax.quant import Recipe, Rule, WeightFormat
from tests.convert.test_calibrate import FIELDS
from tests.qwen_jax.coded_folder import coded_model

FORMAT = WeightFormat(3, 32)
AWARE = Recipe("aware", (Rule("layers.*_proj*", FORMAT, "activation-aware"),))
FLOAT = Recipe("float", (Rule("embed_tokens.weight", WeightFormat(8, 32)),))
# Three query heads read each value head.
HEADS = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 2}
DENSE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "dtype": "float32",
}
KINDS: dict[str, dict[str, Any]] = {
    "qwen3_5_moe": FIELDS | HEADS | {"layer_types": ["linear_attention", "full_attention"]},
    "qwen3_moe": DENSE
    | HEADS
    | {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
    "dense": DENSE | HEADS | {"model_type": "qwen3"},
}
# A feed-forward or its experts in both layers, a shared expert too; attention where there is some.
FOLDED = {"qwen3_5_moe": 2 + 2 + 1, "qwen3_moe": 2 + 2, "dense": 2 + 2}


def model_of(kind: str) -> CausalLM:
    return coded_model(FLOAT, QwenConfig.from_hf(KINDS[kind]))


def chosen(model: CausalLM, recipe: Recipe = AWARE):
    return choose(parameter_shapes(model.config), recipe, calibrated=True)


@pytest.mark.parametrize("kind", KINDS)
def test_a_float_model_computes_the_same_to_the_last_bit(kind):
    model, random = model_of(kind), np.random.default_rng(0)
    tokens = random.integers(0, 64, (2, 9)).astype(np.int32)
    before = np.asarray(model(tokens).logits)
    found = chosen(model).folds
    assert len(found) == FOLDED[kind]
    for path, fold in found.items():
        weight = np.asarray(at(model, path)[...])
        heads, sharers, width = fold.ties(weight.shape[-1], model.config)
        shape = (*weight.shape[:-2], heads, 1, width)
        tied = np.exp2(random.integers(-4, 5, shape)).astype(np.float32)
        factors = np.repeat(tied, sharers, axis=-2).reshape(*weight.shape[:-2], -1)
        rows = np.asarray(at(model, fold.producer)[...])
        fold_weights(model, path, fold, factors, model.config)
        assert (np.asarray(at(model, path)[...]) != weight).mean() > 0.5
        noise = random.uniform(0.8, 1.2, rows.shape)
        coded = np.asarray(at(model, fold.producer)[...]) * noise
        again = folded_factors(rows, coded, fold, weight.shape[-1], model.config)
        np.testing.assert_array_equal(again, factors)
    np.testing.assert_array_equal(np.asarray(model(tokens).logits), before)


def test_both_matrices_must_be_in_codes_and_the_one_in_front_without_bias():
    tree = {f"{n}.weight" for n in ("self_attn.v_proj", "self_attn.o_proj")}
    tree = {f"layers.0.{path}" for path in tree}
    rules = {path: Rule(path, FORMAT, "activation-aware") for path in tree}
    consumer, producer = "layers.0.self_attn.o_proj.weight", "layers.0.self_attn.v_proj.weight"
    assert list(folds(tree, rules)) == [consumer]
    assert not folds({*tree, "layers.0.self_attn.v_proj.bias"}, rules)
    assert not folds(tree, {consumer: rules[consumer]})
    assert folds(tree, {**rules, producer: Rule(producer, FORMAT, "gptq")})
    assert not folds(tree, {**rules, consumer: Rule(consumer, FORMAT, "gptq")})


def test_a_layer_in_codes_computes_the_same_without_its_vectors():
    model = model_of("qwen3_5_moe")
    choice, config, place = chosen(model), model.config, "layers.1."
    rules = {p.removeprefix(place): r for p, r in choice.rules.items() if p.startswith(place)}
    found = {
        path.removeprefix(place): fold.within(place)
        for path, fold in choice.folds.items()
        if path.startswith(place)
    }
    random, layer = np.random.default_rng(1), model.layers[1]
    # Channels that differ give factors that differ.
    for path, fold in found.items():
        inputs = at(layer, path)[...].shape[-1]
        rows = at(layer, fold.producer)[...].shape[:-1]
        loud = np.broadcast_to(np.where(np.arange(rows[-1]) % 13, 1, 16), rows).astype(np.float32)
        fold_weights(layer, path, fold, fold.of_inputs(loud, inputs, config), config)
    hidden = random.standard_normal((2, 16, 32)).astype(np.float32)
    solved = quantise_layer(layer, config, hidden, rules, folds=found)
    before = advance(layer, config, hidden)
    folded = fold_solved(layer, solved, rules, found, config)
    np.testing.assert_array_equal(advance(layer, config, hidden), before)
    assert len(found) == 3
    for path, fold in found.items():
        factors = solved[path].input_scale
        assert factors is not None and np.ptp(factors) > 0
        np.testing.assert_array_equal(np.frexp(factors)[0], 0.5)
        heads = factors.reshape(*factors.shape[:-1], *fold.ties(factors.shape[-1], config))
        np.testing.assert_array_equal(heads, heads[..., :1, :] + 0 * heads)
        assert folded[path].input_scale is None
        for tensor in (folded[path], folded[fold.producer]):
            stored = np.asarray(tensor.codes.scale).astype(jax.numpy.bfloat16)
            np.testing.assert_array_equal(stored.astype(np.float32), tensor.codes.scale)
        np.testing.assert_array_equal(
            folded[fold.producer].codes.values, solved[fold.producer].codes.values
        )
    assert folded["self_attn.q_proj.weight"].input_scale is not None
