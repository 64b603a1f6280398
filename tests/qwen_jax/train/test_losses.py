"""Losses of tokens against their formula in float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen_jax.errors import RequestError
from qwen_jax.model.balance import load_balancing_loss, router_z_loss
from qwen_jax.train import NextTokens, Skeleton, losses


@pytest.fixture(scope="module")
def expected(skeleton, parameters, batch) -> np.ndarray:
    """The loss of each target, from the logits of the model as users call it."""
    model = Skeleton.of(skeleton).filled(parameters)
    logits = np.asarray(model(batch.inputs, batch.lengths).logits, np.float64)
    total = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)) + logits.max(-1)
    return total - np.take_along_axis(logits, np.asarray(batch.targets)[..., None], axis=-1)[..., 0]


PENALTIES = NextTokens(balance=0.5, layer_balance=0.25, router_z=0.125)


@pytest.fixture(scope="module")
def found(skeleton, parameters, batch) -> dict[str, Any]:
    """All that is looked at, by one compiled program; losses in slices of 10 tokens too."""
    frame = Skeleton.of(skeleton)

    @jax.jit
    def run(parameters, batch):
        model, size = frame.filled(parameters), PENALTIES.size(batch)
        output = model.forward(batch.inputs, None, jnp.zeros_like(batch.lengths), batch.lengths)
        sliced = losses.token_log_losses(model, output.residual, batch.targets)
        total, parts = PENALTIES.loss(model, batch, size, 1.0)
        valid = jnp.arange(11)[None, :] < batch.lengths[:, None]
        pooled = load_balancing_loss(output.routing, valid)
        return {
            "size": size,
            "sliced": sliced,
            "total": total,
            "parts": parts,
            "balance": pooled,
            "router_z": router_z_loss(output.routing, valid),
        }

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(losses, "LOGITS_AT_ONCE", 10 * skeleton.config.vocab_size)
        return run(parameters, batch)


def test_the_mean_is_over_what_is_scored(batch, found, expected):
    assert float(found["size"]) == int(batch.scored.sum()) == 26
    mean = expected[np.asarray(batch.scored)].mean()
    assert float(found["parts"]["loss"]) == pytest.approx(mean, rel=1e-5)


def test_slices_of_tokens_change_nothing(batch, found, expected):
    scored = np.asarray(batch.scored)
    np.testing.assert_allclose(np.asarray(found["sliced"])[scored], expected[scored], rtol=1e-5)


def test_penalties_are_added_with_their_weights(found):
    parts = {name: float(value) for name, value in found["parts"].items()}
    assert parts["balance"] == pytest.approx(float(found["balance"]), rel=1e-5)
    assert parts["router_z"] == pytest.approx(float(found["router_z"]), rel=1e-5)
    wanted = parts["loss"] + 0.5 * parts["balance"]
    wanted += 0.25 * parts["layer_balance"] + 0.125 * parts["router_z"]
    assert float(found["total"]) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("wrong", [{"balance": -1.0}, {"router_z": float("inf")}])
def test_refused_weights(wrong):
    with pytest.raises(RequestError, match=f"{next(iter(wrong))} is .* from 0 on"):
        NextTokens(**wrong)
