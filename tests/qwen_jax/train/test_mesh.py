"""Four devices take the steps of one. They are made of a CPU, in a process of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from qwen_jax.errors import RequestError
from qwen_jax.sharding import device_mesh, parameter_axes
from qwen_jax.train.checkpoint import Checkpoints

PROGRAM = """
import dataclasses, json, sys, jax, numpy as np
from pathlib import Path
from qwen_jax import QwenConfig, initialise
from qwen_jax.errors import RequestError
from qwen_jax.model import CausalLM
from qwen_jax.sharding import device_mesh
from qwen_jax.train import AdamW, Data, NextTokens, Trainer, Training, parameters_of
from qwen_jax.train.checkpoint import Checkpoints
from tests.qwen_jax.conftest import TINY

jax.config.update("jax_disable_most_optimizations", True)
assert jax.device_count() == 4
one = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
config = dataclasses.replace(QwenConfig.from_hf(TINY | one), implementation="reference")
data = Data(np.random.default_rng(0).integers(0, 61, 300).astype(np.int32), 4, 11)
training = Training(AdamW(), NextTokens(balance=0.1), expert_dropout=0.2, recompute=False)
found = {}
for name, mesh in {"one": None, "four": device_mesh(2, 2)}.items():
    trainer = Trainer(CausalLM(config), training, mesh=mesh)
    state = trainer.start(parameters_of(initialise(config, jax.random.key(0))))
    state, figures = trainer.steps(state, {}, data.batches(0, 2), np.full(2, 1e-2, np.float32))
    stack = state.trained["layers.0.mlp.experts.down_proj"]
    found[name] = {
        "figures": {key: value.tolist() for key, value in figures.items()},
        "gradients": {key: np.asarray(x).tolist() for key, x in state.optimiser[1].mu.items()},
        "devices": len(stack.sharding.device_set),
        "shard": list(stack.addressable_shards[0].data.shape),
        "moment": list(state.optimiser[1].nu["layers.0.mlp.experts.down_proj"]
                       .addressable_shards[0].data.shape),
    }
with Checkpoints(Path(sys.argv[1]), {}) as checkpoints:
    checkpoints.save(state)
found["saved"] = {key: np.asarray(x).tolist() for key, x in state.trained.items()}
try:
    trainer = Trainer(CausalLM(config), training, mesh=device_mesh(1, 4))
    trainer.start(parameters_of(initialise(config, jax.random.key(0))))
except RequestError as error:
    found["refused"] = str(error)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Where the process saves what four devices hold after two steps."""
    return tmp_path_factory.mktemp("mesh") / "checkpoints"


@pytest.fixture(scope="module")
def found(folder) -> dict:
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder)],
        env={**os.environ, "XLA_FLAGS": flags.strip(), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.slow
def test_losses_and_gradients_are_those_of_one_device(found):
    for name, values in found["one"]["figures"].items():
        assert found["four"]["figures"][name] == pytest.approx(values, rel=1e-4), name
    for name, mean in found["one"]["gradients"].items():
        np.testing.assert_allclose(found["four"]["gradients"][name], mean, atol=1e-6)


@pytest.mark.slow
def test_experts_and_their_moments_lie_apart(found):
    assert (found["one"]["devices"], found["one"]["shard"]) == (1, [6, 32, 16])
    assert (found["four"]["devices"], found["four"]["shard"]) == (4, [3, 32, 16])
    assert found["four"]["moment"] == [3, 32, 16]


@pytest.mark.slow
def test_what_four_devices_saved_is_read_on_one(found, folder, plain, parameters):
    here = plain.start(parameters)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), here)
    with Checkpoints(folder, {}) as checkpoints:
        for like in (here, shapes):
            state = checkpoints.restore(like)
            assert int(state.step) == 2
            assert all(len(leaf.sharding.device_set) == 1 for leaf in jax.tree.leaves(state))
            for name, values in found["saved"].items():
                np.testing.assert_array_equal(state.trained[name], np.float32(values))


@pytest.mark.slow
def test_experts_that_cannot_be_shared_evenly(found):
    assert "6 experts, which 4 devices of the mesh's axis 'expert'" in found["refused"]


def test_more_devices_than_there_are():
    with pytest.raises(RequestError, match=r"mesh of 64 x 2 .* at most"):
        device_mesh(64, 2)


def test_logical_axes():
    assert parameter_axes("layers.3.mlp.experts.down_proj", 3) == ("experts", None, None)
    assert parameter_axes("layers.3.mlp.experts.down_proj.lora_A", 3) == ("experts", None, None)
    assert parameter_axes("layers.3.mlp.shared_expert.down_proj.weight", 2) == (None, None)
