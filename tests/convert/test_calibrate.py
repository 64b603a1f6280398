from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from convert.calibrate import (
    NOT_SENT,
    advance,
    at,
    expert_inputs,
    hessian_of_inputs,
    hessian_of_rows,
    rows_of_experts,
    stages,
)
from convert.layer import quantise_layer
from convert.layer_fit import layer_error
from convert.methods import dequantise, rounded_without_data
from convert.tuning import Start, fit_codes
from qwen_jax import CausalLM, QwenConfig
from qwen_jax.errors import RequestError
from qwen_jax.quant import Method, Recipe, Rule, WeightFormat
from tests.qwen_jax.coded_folder import coded_model

# Full attention at 1 and 2: not every fourth.
KINDS = ["linear_attention", "full_attention", "full_attention", "linear_attention"]
# Few different shapes of matrices, since each is compiled.
FIELDS = {
    "model_type": "qwen3_5_moe_text",
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "layer_types": KINDS,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "dtype": "float32",
}
MIXERS = {
    "linear_attention": (
        {f"linear_attn.in_proj_{x}" for x in ("qkv", "z", "a", "b")},
        {"linear_attn.out_proj"},
    ),
    "full_attention": ({f"self_attn.{x}_proj" for x in "qkv"}, {"self_attn.o_proj"}),
}


@pytest.fixture(scope="module")
def model() -> CausalLM:
    # Layers as NumPy makes them; the embedding is not looked at.
    recipe = Recipe("layers stay", (Rule("embed_tokens.weight", WeightFormat(8, 32)),))
    return coded_model(recipe, QwenConfig.from_hf(FIELDS))


def hidden_states(windows: int, length: int) -> np.ndarray:
    return np.random.default_rng(1).standard_normal((windows, length, 32)).astype(np.float32)


def copy(layer):
    return jax.tree.map(lambda x: x, layer)


def rules_of(layer, bits: int) -> dict[str, Rule]:
    linears = [
        f"{path}.weight"
        for paths in stages(layer, QwenConfig.from_hf(FIELDS))
        for path in paths
        if path.endswith(("proj", "qkv", "z"))
    ]
    paths = [*linears, "mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    # Each shape is compiled for, and some methods sooner.
    methods: dict[str, Method] = {
        "linear_attn.in_proj_qkv.weight": "round-to-nearest",
        "mlp.experts.gate_up_proj": "activation-aware",
    }
    return {p: Rule(p, WeightFormat(bits, 32), methods.get(p, "gptq")) for p in paths}


def test_stages_follow_the_layer_types(model):
    for layer, kind in zip(model.layers, KINDS, strict=True):
        found = [set(paths) for paths in stages(layer, model.config)]
        assert found[:2] == list(MIXERS[kind])
        assert {"mlp.experts", "mlp.shared_expert.gate_proj"} < found[2]
        assert found[3:] == [{"mlp.shared_expert.down_proj"}]


def test_hessians_are_of_what_the_linears_read(model):
    layer, hidden = model.layers[1], hidden_states(3, 8)
    x = np.asarray(layer.input_layernorm(jnp.asarray(hidden)), np.float64).reshape(-1, 32)
    found = hessian_of_inputs(layer, model.config, hidden, "self_attn.q_proj", windows_at_once=2)
    np.testing.assert_allclose(found, x.T @ x / 24, atol=1e-5)


def test_every_expert_has_rows_and_those_that_it_was_sent_come_first(model):
    layer = model.layers[0]
    data = expert_inputs(layer, model.config, hidden_states(1, 16), "mlp.experts")
    sent, weights = np.asarray(data.sent), np.asarray(data.weights)
    assert (sent.sum(axis=1) == 2).all()
    np.testing.assert_allclose((sent * weights).sum(axis=1), 1, rtol=1e-5)

    rows = rows_of_experts(data, jnp.arange(8), 6)
    hessians = np.asarray(hessian_of_rows(rows))
    for expert in range(8):
        order = sorted(range(16), key=lambda t: (not sent[t, expert], -weights[t, expert]))[:6]
        strength = np.where(sent[order, expert], 1, NOT_SENT) * weights[order, expert]
        x = np.asarray(data.inputs, np.float64)[order]
        expected = (x.T * (strength / strength.sum())) @ x
        np.testing.assert_allclose(hessians[expert], expected, rtol=1e-4, atol=1e-5)
        assert rows.sent[expert] == min(6, sent[:, expert].sum())


def test_four_tokens_put_every_tensor_in_codes(model):
    layer = copy(model.layers[0])
    before = copy(layer)
    rules = {
        path: rule if ".experts." in path else dataclasses.replace(rule, method="round-to-nearest")
        for path, rule in rules_of(layer, 3).items()
    }
    solved = quantise_layer(layer, model.config, hidden_states(1, 4), rules)
    assert solved.keys() == rules.keys()
    for path, value in solved.items():
        wide = np.asarray(value.weight(rules[path].format))
        np.testing.assert_array_equal(wide, at(layer, path)[...])
        original = np.asarray(at(before, path)[...])
        assert np.isfinite(wide).all() and value.codes.values.shape == original.shape
        assert np.linalg.norm(wide - original) < 0.4 * np.linalg.norm(original)
        report = value.report
        assert (report.samples, report.bits, report.fallback) == (4, 3, ())
        np.testing.assert_allclose(
            report.weight_error,
            np.linalg.norm(wide - original) / np.linalg.norm(original),
            rtol=1e-3,
        )
    # Three of the eight are sent nothing, or one token.
    assert solved["mlp.experts.down_proj"].report.routed <= 1


def test_each_matrix_sees_the_ones_before_it_in_codes(model):
    hidden = hidden_states(2, 16)
    together, apart = copy(model.layers[1]), copy(model.layers[1])
    rules = {k: rule for k, rule in rules_of(together, 3).items() if k.startswith("self_attn.")}
    whole = quantise_layer(together, model.config, hidden, rules)
    first = {path: rule for path, rule in rules.items() if path[-13:-12] in "qkv"}
    assert len(first) == 3
    quantise_layer(apart, model.config, hidden, first)
    last = {"self_attn.o_proj.weight": rules["self_attn.o_proj.weight"]}
    again = quantise_layer(apart, model.config, hidden, last)
    for path, value in again.items():
        np.testing.assert_array_equal(value.codes.values, whole[path].codes.values)


@pytest.mark.parametrize("rate", [0.025, 30.0])
def test_fitted_codes_are_never_worse_than_their_start(model, rate):
    layer, hidden = copy(model.layers[1]), hidden_states(6, 16)
    target = advance(layer, model.config, hidden)
    path, format = "self_attn.o_proj.weight", WeightFormat(3, 32)
    weight = at(layer, path)[...]
    solved = rounded_without_data(np.asarray(weight), Rule(path, format))
    scale = np.asarray(jnp.asarray(solved.codes.scale * 1.25).astype(jnp.bfloat16), np.float32)
    start = Start(solved.codes._replace(scale=scale), solved.input_scale)
    at(layer, path).set_value(dequantise(start.codes, format))
    before = advance(layer, model.config, hidden)
    batches = [(hidden[i : i + 2], target[i : i + 2]) for i in (0, 2, 4)]
    losses: list[float] = []
    fit = fit_codes(
        layer,
        {path: weight},
        {path: start},
        {path: format},
        layer_error(model.config),
        batches[:2] * 60,
        batches[2:],
        code_rate=rate,
        scale_rate=rate,
        tell=lambda step, loss: losses.append(float(loss)),
    )
    codes = fit.codes[path]
    at(layer, path).set_value(dequantise(codes, format))
    after = advance(layer, model.config, hidden)
    first, last = (np.square(y[4:] - target[4:]).sum() for y in (before, after))
    assert len(losses) == 120 and losses[0] == pytest.approx(fit.before, rel=0.5)
    assert fit.better == (rate < 1) == (fit.after < fit.before)
    if fit.better:
        assert last < 0.8 * first and losses[-1] < 0.8 * losses[0]
        np.testing.assert_allclose(fit.after / fit.before, last / first, rtol=1e-3)
        assert np.any(codes.values != start.codes.values)
        assert np.any(codes.scale != scale)
    else:
        assert last == first  # the steps are far too large, so all is as it was
    assert codes.values.dtype == np.uint8 and codes.values.max() < 8
    stored = jnp.asarray(codes.scale).astype(jnp.bfloat16).astype(jnp.float32)
    np.testing.assert_array_equal(codes.scale, stored)
    assert np.isfinite(codes.scale).all() and (codes.scale > 0).all()


def test_a_rule_for_no_matrix_is_refused(model):
    rules = {"self_attn.q_proj.weight": Rule("*", WeightFormat(3, 32))}
    with pytest.raises(RequestError, match=r"self_attn\.q_proj\.weight"):
        quantise_layer(copy(model.layers[0]), model.config, hidden_states(1, 4), rules)
    with pytest.raises(RequestError, match="leaves its tensor"):
        rule = dataclasses.replace(rules["self_attn.q_proj.weight"], format=None)
        quantise_layer(
            copy(model.layers[1]),
            model.config,
            hidden_states(1, 4),
            {"self_attn.q_proj.weight": rule},
        )
