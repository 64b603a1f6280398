"""A model in codes against the same model with the numbers that its codes stand for."""

from __future__ import annotations

import dataclasses
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pallas_kernels._compat import H200, targeting
from pallas_kernels.dequant_matmul.layout import unpack
from pallas_kernels.dispatch import recording
from qwen_jax import CausalLM, QwenConfig, init_cache
from qwen_jax.decode import decode_step, prefill
from qwen_jax.errors import RequestError
from qwen_jax.model import FlatModel, abstract_model, initialise, parameter_shapes
from qwen_jax.model.layers import project_together
from qwen_jax.quant import QTensor, Recipe, Rule, WeightFormat, scheme_of
from tests.qwen_jax.coded_folder import coded_model

# Sizes that are multiples neither of a unit nor of a group.
CONFIG = {
    "model_type": "qwen3_5_moe_text",
    "vocab_size": 61,
    "hidden_size": 72,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 20,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 33,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
    },
    "dtype": "float32",
}
MIXED = Recipe(
    "mixed",
    (
        Rule("*.experts.gate_up_proj", WeightFormat(3, 64)),
        Rule("*.experts.down_proj", WeightFormat(4, 32, symmetric=False)),
        Rule("*.self_attn.?_proj.weight", WeightFormat(3, 32, symmetric=False)),
        Rule("*.linear_attn.in_proj_[qz]*.weight", WeightFormat(4, 32)),
        Rule("*.linear_attn.out_proj.weight", WeightFormat(4, 32)),
        Rule("*.shared_expert.*_proj.weight", WeightFormat(8, 32)),
        Rule("*.mlp.*_proj.weight", WeightFormat(3, 32)),
        Rule("lm_head.weight", WeightFormat(8, 64, symmetric=False)),
        Rule("embed_tokens.weight", WeightFormat(4, 64)),
    ),
)


# Share their input with others, and are one product with those of them that have no factors.
TOGETHER = ("q_proj", "k_proj", "in_proj_qkv", "gate_proj")


def coded(config: QwenConfig, recipe: Recipe = MIXED) -> CausalLM:
    """A random model in codes, with factors of inputs in some matrices."""
    model, random = coded_model(recipe, config), np.random.default_rng(2)
    state = nnx.state(model)
    for path, variable in nnx.to_flat_state(state):
        value = variable.get_value()
        if isinstance(value, QTensor):
            columns = (*value.shape[:-2], value.inputs)
            factor = jnp.asarray(random.uniform(0.5, 2, columns), jnp.float32)
            if path[-1] == "gate_up_proj" or path[-2] in TOGETHER:
                factor = None
            variable.set_value(dataclasses.replace(value, input_scale=factor))
    nnx.update(model, state)
    return model


def numbers(q: QTensor) -> np.ndarray:
    """What codes stand for, from the format's definition, in float64."""
    codes = unpack(np.asarray(q.codes), q.inputs).astype(np.float64)
    group = np.arange(q.inputs) // q.group_size
    centre = {3: 3.5, 4: 7.5, 8: 128.0}[q.bits]
    zero = centre if q.zero is None else np.asarray(q.zero, np.float64)[..., group]
    wide = np.asarray(q.scale, np.float64)[..., group] * (codes - zero)
    return wide if q.input_scale is None else wide * np.asarray(q.input_scale)[..., None, :]


def plain(model: CausalLM) -> CausalLM:
    """The same model with arrays in place of codes, in float32."""
    other = CausalLM(dataclasses.replace(model.config, dtype="float32"))
    state = nnx.state(other)
    given = dict(nnx.to_flat_state(nnx.state(model)))
    for path, variable in nnx.to_flat_state(state):
        value = given[path].get_value()
        wide = numbers(value) if isinstance(value, QTensor) else value
        variable.set_value(jnp.asarray(wide, jnp.float32))
    nnx.update(other, state)
    return other


PREFILL, STEP = jax.jit(prefill), jax.jit(decode_step)


def run(model: CausalLM, tokens: np.ndarray) -> np.ndarray:
    """Logits of a prompt, long enough to be sorted by expert, and of a step after it."""
    cache = init_cache(model.config, 2, 128)
    lengths = jnp.full((2,), 76, jnp.int32)
    first, cache = PREFILL(model, cache, jnp.asarray(tokens[:, :76]), lengths)
    second, cache = STEP(model, cache, jnp.asarray(tokens[:, 76]))
    return np.stack([np.asarray(output.logits) for output in (first, second)])


@pytest.fixture(scope="module")
def tokens() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 61, (2, 77)).astype(np.int32)


def test_logits_are_those_of_the_numbers(tokens):
    model = coded(QwenConfig.from_hf(CONFIG))
    kinds = [type(v.get_value()) for _, v in nnx.to_flat_state(nnx.state(model))]
    assert kinds.count(QTensor) == 2 + 4 + 3 + 2 * 5

    actual = run(model, tokens)

    wanted = np.asarray(plain(model)(tokens, capture="none").logits[:, -2:]).swapaxes(0, 1)
    assert np.isfinite(wanted).all()
    assert np.abs(actual - wanted).max() < 1e-4 * wanted.std()


def test_a_tied_head_and_biases(tokens):
    config = {
        "model_type": "qwen2",
        "vocab_size": 61,
        "hidden_size": 72,
        "intermediate_size": 40,
        "num_hidden_layers": 1,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "rope_theta": 10000.0,
        "dtype": "float32",
    }
    model = coded(QwenConfig.from_hf(config))
    for name, factor in (("q_proj", 0.02), ("k_proj", -0.1)):
        bias = getattr(model.layers[0].self_attn, name).bias
        bias.set_value(jnp.arange(bias.shape[0], dtype=jnp.float32) * factor)

    actual, wanted = (np.asarray(each(tokens[:, :9]).logits) for each in (model, plain(model)))

    assert np.abs(actual - wanted).max() < 1e-4 * wanted.std()


def test_what_stands_in_the_place_of_a_linear_is_called():
    """Its rows are its own, and the results stay in order."""
    attention = coded(QwenConfig.from_hf(CONFIG)).layers[1].self_attn
    linears = attention.q_proj, attention.k_proj, attention.v_proj
    x = jnp.asarray(np.random.default_rng(1).normal(0, 1, (2, 3, 72)), jnp.float32)
    alone = [linear(x) for linear in linears]
    for place in range(3):
        others = list(linears)
        others[place] = lambda rows, linear=linears[place]: linear(rows) + 1
        found = project_together(x, others)
        for index, (y, wanted) in enumerate(zip(found, alone, strict=True)):
            extra = 1.0 if index == place else 0.0
            np.testing.assert_allclose(y, wanted + extra, rtol=1e-5, atol=1e-5)


def test_matrices_that_share_their_input_are_one_call():
    """Of each layer: into the mixer, and out of it. The shared expert is a part of its experts."""
    config = QwenConfig.from_hf(CONFIG | {"dtype": "bfloat16"})
    model = abstract_model(config, scheme_of(parameter_shapes(config), MIXED))
    cache = jax.eval_shape(lambda: init_cache(config, 1, 128))
    with targeting(H200), recording() as calls:
        jax.eval_shape(decode_step, model, cache, jax.ShapeDtypeStruct((1,), jnp.int32))
    products = [call for call in calls if call.operation == "dequant_matmul"]
    assert {call.choice.chosen for call in products} == {"triton"}
    found = Counter(call.arrays["weights"].count("QTensor") for call in products)
    # With the gates in front of the delta rule; and the head.
    assert found == {3: 1, 2: 1, 1: 1 + 1 + 1}
    # Two of each layer, that behind the delta rule, and the final one.
    assert sum(call.operation == "rms_norm" for call in calls) == 2 * 2 + 1 + 1
    arrays = [call.arrays["weights"].rsplit("), ")[-1] for call in products]
    assert arrays.count("bfloat16[2, 72], bfloat16[2, 72])") == 1


def test_without_a_cache_and_in_bfloat16(tokens):
    config = dataclasses.replace(QwenConfig.from_hf(CONFIG), dtype="bfloat16")
    model = coded(config)
    output = model(tokens, capture="none")
    assert output.logits.dtype == jnp.float32
    narrow = np.asarray(output.logits)

    wide = np.asarray(plain(model)(tokens, capture="none").logits)

    cosine = (narrow * wide).sum() / np.sqrt((narrow**2).sum() * (wide**2).sum())
    assert cosine > 0.99


def test_an_id_outside_the_table_is_nan():
    model = coded(QwenConfig.from_hf(CONFIG))
    rows = model.embed_tokens(jnp.asarray([[3, 61, -1]], jnp.int32))
    assert np.isfinite(np.asarray(rows[0, 0])).all()
    assert np.isnan(np.asarray(rows[0, 1:])).all()


def test_the_table_is_never_numbers_as_a_whole():
    """The step's memory beside its arguments is less than a table of numbers would take."""
    config = dataclasses.replace(QwenConfig.from_hf(CONFIG), vocab_size=100_000)
    model = jax.eval_shape(
        lambda key: FlatModel.of(initialise(config, key, MIXED)), jax.random.key(0)
    )
    embed = lambda flat, ids: jax.tree.unflatten(flat.structure.tree, flat.leaves).embed_tokens(ids)  # noqa: E731
    memory = jax.jit(embed).lower(model, jax.ShapeDtypeStruct((1, 8), jnp.int32)).compile()
    assert memory.memory_analysis().temp_size_in_bytes < 100_000 * 72


def test_random_codes_have_the_variance_of_random_numbers():
    config = QwenConfig.from_hf(
        CONFIG | {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    )
    for path, variable in nnx.to_flat_state(
        nnx.state(initialise(config, jax.random.key(3), MIXED))
    ):
        value = variable.get_value()
        if not isinstance(value, QTensor):
            continue
        name = ".".join(map(str, path))
        back = name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj"))
        wanted = (
            1.0 if name == "embed_tokens.weight" else (value.inputs * (2 if back else 1)) ** -0.5
        )
        assert numbers(value).std() == pytest.approx(wanted, rel=0.05), name
        # The tail of the last unit is 0, as the format has it.
        units = value.codes.shape[-1] * 32
        assert not unpack(np.asarray(value.codes), units)[..., value.inputs :].any(), name


def test_a_recipe_that_does_not_fit_is_refused():
    recipe = Recipe("wide", (Rule("*.experts.*", WeightFormat(3, 128)),))
    with pytest.raises(RequestError, match="fewer than a group of 128"):
        initialise(QwenConfig.from_hf(CONFIG), jax.random.key(0), recipe)
