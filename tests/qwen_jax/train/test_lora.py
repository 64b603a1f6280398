"""LoRA: the change of a matrix, and what is trained of it."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from qwen_jax.errors import RequestError
from qwen_jax.train import AdamW, Trainer, Training
from qwen_jax.train.lora import Lora
from tests.qwen_jax.train.conftest import stacked

LORA = Lora(("*.self_attn.q_proj.weight", "*.experts.*", "*.mlp.gate.weight"), rank=2, alpha=6.0)


@pytest.fixture(scope="module")
def trained(skeleton, parameters, batch):
    """The trainer, and thin matrices after two steps: B leaves zero in the first."""
    trainer = Trainer(skeleton, Training(AdamW(decay=0.0), recompute=False), LORA.merged)
    state = trainer.start(LORA.start(parameters, jax.random.key(1)))
    matrices = "self_attn.q_proj.weight", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
    assert sorted(state.trained) == sorted(
        f"layers.0.{path}.lora_{part}" for path in (*matrices, "mlp.gate.weight") for part in "AB"
    )
    rates = np.full(2, 1e-2, np.float32)
    return trainer, *trainer.steps(state, parameters, stacked(batch, 2), rates)


def test_nothing_changes_at_first(parameters):
    merged = LORA.merged(LORA.start(parameters, jax.random.key(1)), parameters)
    assert list(merged) == list(parameters)
    for name, value in merged.items():
        np.testing.assert_array_equal(value, parameters[name])


def test_the_merged_matrix_is_the_formula(parameters):
    random, thin = np.random.default_rng(0), LORA.start(parameters, jax.random.key(1))
    thin = {name: random.normal(size=x.shape).astype(np.float32) for name, x in thin.items()}
    merged = LORA.merged(thin, parameters)
    for path in ("layers.0.self_attn.q_proj.weight", "layers.0.mlp.experts.down_proj"):
        up, down = (thin[f"{path}.lora_{part}"].astype(np.float64) for part in "BA")
        wanted = np.asarray(parameters[path], np.float64) + 6.0 / 2 * up @ down
        np.testing.assert_allclose(merged[path], wanted, atol=1e-5)
    same = merged.keys() - {name.rsplit(".", 1)[0] for name in thin}
    assert all(merged[name] is parameters[name] for name in same)
    assert len(same) == len(parameters) - 4


@pytest.mark.slow
def test_thin_matrices_learn(trained):
    _, state, found = trained
    assert found["loss"][1] < found["loss"][0]
    for name, value in state.trained.items():
        # B leaves zero in the first step, and A moves from the second on.
        assert float(abs(value).max()) > 1e-3, name


@pytest.mark.slow
def test_the_merged_model_has_the_loss_of_the_trained_one(trained, plain, parameters, batch):
    trainer, state, _ = trained
    merged = LORA.merged(state.trained, parameters)
    np.testing.assert_allclose(
        plain.loss(merged, {}, batch), trainer.loss(state.trained, parameters, batch), rtol=1e-6
    )


def test_refusals(parameters):
    key = jax.random.key(0)
    with pytest.raises(RequestError, match=r"no matrix matches '\*\.q_proj'"):
        Lora(("*.q_proj",)).start(parameters, key)
    with pytest.raises(RequestError, match="no matrix matches"):
        Lora(("*norm.weight",)).start(parameters, key)
    with pytest.raises(RequestError, match=r"rank is 9, but .* is 6 x 32"):
        Lora(("*.mlp.gate.weight",), rank=9).start(parameters, key)
    with pytest.raises(RequestError, match="rank is 0"):
        Lora(rank=0)
