from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from convert import model_fit
from convert.methods import Codes
from convert.tuning import Start
from pallas_kernels.dispatch import recording
from qwen_jax.config import QwenConfig
from qwen_jax.model import CausalLM, FlatModel
from qwen_jax.quant import WeightFormat
from tests.convert.quantization import models

LAYERS = ["full_attention", "full_attention"]


def test_every_window_is_seen_and_none_that_is_held_out():
    tokens = np.arange(40, dtype=np.int32)[:, None]
    seen, held_out = model_fit.divided(tokens, 10, 7)
    assert held_out[:, 0].tolist() == [6, 13, 19, 26, 32]
    batches = np.concatenate(model_fit.batches(seen, 10, 7))[:, 0]
    assert len(batches) == 70
    assert set(batches) == set(range(40)) - set(held_out[:, 0])
    assert len(set(batches[:35])) == 35
    assert (np.diff(batches[:7]) != 1).any()


@pytest.mark.parametrize("asymmetric", [False, True])
def test_what_codes_miss_and_what_they_clip(asymmetric):
    random = np.random.default_rng(2)
    values = random.integers(0, 8, (2, 3, 40)).astype(np.uint8)
    scale = random.uniform(0.5, 1, (2, 3, 2)).astype(np.float32)
    zero = random.uniform(2, 5, (2, 3, 2)).astype(np.float32) if asymmetric else None
    factor = random.uniform(0.5, 2, (2, 40)).astype(np.float32)
    weight = random.normal(0, 2, values.shape).astype(np.float32)

    group = np.arange(40) // 32
    middle = 3.5 if zero is None else zero.astype(np.float64)[..., group]
    step = scale.astype(np.float64)[..., group] * factor[:, None, :]
    missed = np.linalg.norm(weight - step * (values - middle)) / np.linalg.norm(weight)
    place = weight / step + middle
    clipped = ((place < -0.5) | (place > 7.5)).mean()
    assert 0.01 < clipped < 0.9

    start = Start(
        Codes(
            jnp.asarray(values),
            jnp.asarray(scale),
            None if zero is None else jnp.asarray(zero),
        ),
        jnp.asarray(factor),
    )
    format = WeightFormat(3, 32, symmetric=not asymmetric)
    found = model_fit.judged(jnp.asarray(weight), start, format)
    np.testing.assert_allclose(found, [missed, clipped], rtol=1e-5)


@pytest.mark.parametrize(("used", "sorted_by_expert"), [(2, 0), (1, 4)])
def test_all_experts_are_computed_where_a_token_uses_many_of_them(used, sorted_by_expert):
    """Sorted tokens are a loop over tiles, thousands of launches a step; both models have two."""
    config = QwenConfig.from_hf(
        models.SIZES
        | {"model_type": "qwen3_5_moe_text", "num_hidden_layers": 2, "layer_types": LAYERS}
        | {"num_experts": 12, "num_experts_per_tok": used, "rope_theta": 1e4}
    )
    model = CausalLM(config)
    tokens = jax.ShapeDtypeStruct((2, 64), jnp.int32)
    with recording() as calls:
        jax.eval_shape(
            lambda one, other, tokens: model_fit.divergence(one.module(), other, tokens),
            *(FlatModel.of(model), FlatModel.of(model), tokens),
        )
    assert [call.operation for call in calls].count("expert_dispatch") == sorted_by_expert
