"""Tensors in codes under jit, scan, sharding, and in Orbax checkpoints."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

from qwen_jax.model import abstract_model
from qwen_jax.quant import QTensor, TensorScheme, WeightFormat, abstract_qtensor
from qwen_jax.quant.random import random_qtensor
from tests.qwen_jax.coded_folder import arrays_of, coded_model, scheme_from, write_coded

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def stack() -> QTensor:
    """Three matrices of 5 x 72."""
    like = abstract_qtensor((3, 5, 72), TensorScheme(WeightFormat(3, 64, False), True))
    return random_qtensor(like, 1.0, jax.random.key(0))


def test_jit_and_scan_take_it_apart_and_put_it_together(stack):
    whole = np.asarray(stack.dequantise(jnp.float32))

    @jax.jit
    def each(stack):
        return jax.lax.scan(lambda n, q: (n + 1, (q, q.dequantise(jnp.float32))), 0, stack)

    count, (again, numbers) = each(stack)

    assert int(count) == 3
    np.testing.assert_array_equal(np.asarray(numbers), whole)
    assert isinstance(again, QTensor) and again.shape == (3, 5, 72)
    assert jax.tree.structure(again) == jax.tree.structure(stack)
    np.testing.assert_array_equal(np.asarray(again.codes), np.asarray(stack.codes))


def test_a_matrix_of_a_stack(stack):
    one = stack[1]
    assert one.shape == (5, 72) and one.bits == 3
    assert one.nbytes * 3 == stack.nbytes == 3 * (5 * 3 * 3 * 4 + 2 * 5 * 2 * 2 + 72 * 4)
    np.testing.assert_array_equal(
        np.asarray(one.dequantise(jnp.float32)), np.asarray(stack.dequantise(jnp.float32))[1]
    )


def test_a_model_survives_a_checkpoint(tmp_path):
    model = coded_model()
    abstract = abstract_model(model.config, scheme_from(model))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", nnx.to_pure_dict(nnx.state(model)))
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", nnx.to_pure_dict(nnx.state(abstract)))
    state = nnx.state(abstract)
    nnx.replace_by_pure_dict(state, restored)
    nnx.update(abstract, state)

    assert jax.tree.structure(abstract) == jax.tree.structure(model)
    for a, b in zip(jax.tree.leaves(abstract), jax.tree.leaves(model), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


PROGRAM = """
import dataclasses, json, sys
import jax, numpy as np
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_disable_most_optimizations", True)
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from flax import nnx
from qwen_jax import CausalLM, QwenConfig
from qwen_jax.checkpoint.parameters import abstract_parameters, load_parameters
from qwen_jax.checkpoint.plan import plan_load
from qwen_jax.checkpoint.safetensors_io import open_folder
from qwen_jax.errors import CheckpointError
from qwen_jax.quant import in_codes

mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
plan = plan_load(open_folder(sys.argv[1]), QwenConfig.from_hf(sys.argv[1]))
targets = in_codes(abstract_parameters(plan.config), plan.scheme)

def split(leaf, axis):
    names = [None] * len(leaf.shape)
    if axis is not None:
        names[axis] = "x"
    sharding = NamedSharding(mesh, PartitionSpec(*names))
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

def logits(path, axes):
    placed = jax.tree.map(lambda leaf: split(leaf, None), targets)
    q = targets[path]
    placed[path] = dataclasses.replace(
        q, **{name: split(getattr(q, name), axis) for name, axis in axes.items()}
    )
    try:
        arrays = load_parameters(plan, placed)
    except CheckpointError as error:
        return str(error)
    model = CausalLM(plan.config)
    state = nnx.state(model)
    for parts, variable in nnx.to_flat_state(state):
        variable.set_value(arrays[".".join(map(str, parts))])
    nnx.update(model, state)
    assert len(arrays[path].codes.sharding.device_set) == 2
    halves = {shard.data.shape for shard in arrays[path].codes.addressable_shards}
    tokens = np.arange(7)[None]
    return [sorted(halves), np.asarray(model(tokens, capture="none").logits[0, -1]).tolist()]

up, out = "layers.0.mlp.experts.gate_up_proj", "layers.0.self_attn.o_proj.weight"
print(json.dumps({
    "outputs": logits(up, {"codes": 1, "scale": 1}),
    "inputs": logits(out, {"codes": 2, "scale": 1}),
    "group cut": logits(up, {"codes": 3, "scale": 2}),
    "apart": logits(out, {"codes": 2, "scale": 0}),
}))
"""


def test_two_devices_share_outputs_or_whole_groups(tmp_path):
    """`o_proj` has 64 inputs in groups of 32; experts have 32 x 3, of which halves cut a group."""
    changes = {"hidden_size": 96, "head_dim": 32, "vocab_size": 64, "eos_token_id": 1}
    model = coded_model(**changes)
    folder = write_coded(tmp_path / "codes", arrays_of(model), scheme_from(model), **changes)
    wanted = np.asarray(model(np.arange(7)[None], capture="none").logits)[0, -1]

    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder)], cwd=ROOT, capture_output=True, text=True
    )

    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    for name, half in (("outputs", [3, 36, 3, 3]), ("inputs", [96, 8, 1])):
        shapes, logits = result[name]
        assert shapes == [half]
        assert np.abs(np.asarray(logits) - wanted).max() < 1e-5 * wanted.std()
    text = result["group cut"]
    assert "96 inputs in groups of 32 are split over 2 devices" in text, text
    assert "multiple of 64" in text
    assert "layers.0.self_attn.o_proj.weight" in result["apart"]
