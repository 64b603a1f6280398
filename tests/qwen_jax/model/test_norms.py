"""The norms inside a decoder layer: which dtype each hands on, and what they become on a GPU."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pallas_kernels._compat import lower_for_cuda
from qwen_jax import init_cache
from qwen_jax.config import QwenConfig
from qwen_jax.decode import decode_step
from qwen_jax.model import CausalLM
from qwen_jax.model.decoder import DecoderLayer
from qwen_jax.model.layers import RMSNorm


@pytest.mark.parametrize(
    ("preset", "after_mixer"), [("qwen3.6-35b-a3b", "float32"), ("qwen3.5-0.8b", "bfloat16")]
)
def test_projections_get_the_models_dtype_and_the_router_float32(preset, after_mixer):
    config = QwenConfig.preset(preset)
    layer = DecoderLayer(config, 0)
    x = jax.ShapeDtypeStruct((1, 1, config.hidden_size), jnp.float32)
    mixed = jax.ShapeDtypeStruct(x.shape, jnp.bfloat16)
    assert jax.eval_shape(RMSNorm.__call__, layer.input_layernorm, x).dtype == jnp.bfloat16
    second = layer.post_attention_layernorm
    total, normal = jax.eval_shape(RMSNorm.after_adding, second, x, mixed)
    assert (total.dtype, normal.dtype) == (jnp.float32, after_mixer)


def test_the_sum_is_what_is_normalised():
    norm = RMSNorm(4, "float32", eps=0.0, zero_centred=False, implementation=None)
    norm.weight = nnx.Param(jnp.full(4, 2.0))
    x, y = jnp.array([1.0, 0.0, 3.0, 0.0]), jnp.array([-1.0, 4.0, 0.0, 0.0])
    total, normal = norm.after_adding(x, y)
    np.testing.assert_array_equal(total, [0, 4, 3, 0])
    np.testing.assert_allclose(normal, np.array([0, 4, 3, 0]) * 2 / 2.5, rtol=1e-6)


def test_small_weights_of_a_zero_centred_norm_are_not_lost():
    """1 + w is formed in float32: bfloat16 has no number between 1 and 1.0078."""
    weight = jnp.asarray(np.random.default_rng(0).uniform(1e-3, 3e-3, 48), jnp.bfloat16)
    norm = RMSNorm(48, "bfloat16", eps=1e-6, zero_centred=True, implementation="reference")
    norm.weight = nnx.Param(weight)
    x = np.random.default_rng(1).standard_normal((3, 48)).astype(np.float32)
    wide = x.astype(np.float64)
    normal = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6)
    wanted = normal * (1 + np.asarray(weight, np.float64))
    np.testing.assert_allclose(norm(jnp.asarray(x), "float32"), wanted, rtol=1e-6)


def test_a_decode_step_on_a_gpu_takes_one_launch_a_norm():
    config = QwenConfig.preset("qwen3.6-35b-a3b")
    config = dataclasses.replace(config, num_hidden_layers=1, layer_types=config.layer_types[:1])
    cache = jax.eval_shape(lambda: init_cache(config, 1, 128))
    tokens = jax.ShapeDtypeStruct((1,), jnp.int32)
    module = lower_for_cuda(decode_step, CausalLM(config), cache, tokens)
    kernels = [line for line in module.splitlines() if "xla.gpu.triton" in line]
    # In front of the mixer, in front of the experts, and the final one.
    assert len([line for line in kernels if 'name = "rms_norm"' in line]) == 3
