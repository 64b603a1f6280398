"""Weights on the device: values, dtypes, placement, and the host memory that loading takes."""

from __future__ import annotations

import math
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen_jax.checkpoint.mapping import Layout
from qwen_jax.checkpoint.parameters import abstract_parameters, load_parameters
from qwen_jax.checkpoint.plan import plan_load
from qwen_jax.checkpoint.safetensors_io import open_folder
from qwen_jax.errors import CheckpointError

RELEASED = {
    "qwen3_next": Layout(experts="per_expert", linear_projections="interleaved"),
    "qwen3_5_moe_text": Layout("model.language_model."),
    "qwen3_moe": Layout(experts="per_expert"),
}


@pytest.fixture(params=RELEASED)
def released(request, tiny, random_tree, stored, write_folder):
    """The tree of a tiny model, and the plan of a folder that holds it as released."""
    config = tiny(request.param)
    tree = random_tree(config)
    path = write_folder(stored(config, tree, RELEASED[request.param]), shards=2)
    return tree, plan_load(open_folder(path), config)


def keeps_float32(path):
    return path.endswith(("linear_attn.A_log", "linear_attn.dt_bias", "linear_attn.norm.weight"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_arrays_have_the_stored_values_and_the_model_dtype(released, dtype):
    tree, plan = released
    arrays = load_parameters(plan, abstract_parameters(plan.config, dtype))
    assert arrays.keys() == tree.keys()
    for path, array in arrays.items():
        assert isinstance(array, jax.Array)
        assert array.dtype == (jnp.float32 if keeps_float32(path) else jnp.dtype(dtype)), path
        np.testing.assert_array_equal(np.asarray(array).astype(np.float32), tree[path])


def test_arrays_take_the_bytes_of_the_file(tiny, random_tree, stored, write_folder):
    config = tiny("qwen3_moe")
    path = write_folder(stored(config, random_tree(config), Layout(experts="per_expert")))
    plan = plan_load(open_folder(path), config)
    arrays = load_parameters(plan, abstract_parameters(config))
    assert sum(array.nbytes for array in arrays.values()) == plan.nbytes == plan.folder.nbytes


@pytest.mark.parametrize("source", [np.float16, np.float32])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_other_stored_dtypes_are_cast(tiny, random_tree, stored, write_folder, source, dtype):
    config = tiny("qwen3_next")
    tree = random_tree(config)
    arrays = stored(config, tree, RELEASED["qwen3_next"])
    path = write_folder({key: array.astype(source) for key, array in arrays.items()})
    plan = plan_load(open_folder(path), config)
    loaded = load_parameters(plan, abstract_parameters(config, dtype))
    for name, array in loaded.items():
        np.testing.assert_array_equal(np.asarray(array).astype(np.float32), tree[name])


def test_values_that_kept_float32_are_not_rounded(tiny, random_tree, stored, write_folder):
    config = tiny("qwen3_5_moe_text")
    arrays = stored(config, random_tree(config), Layout())
    fine = np.float32(1) + np.arange(4, dtype=np.float32) * np.float32(2**-20)
    arrays["model.layers.0.linear_attn.A_log"] = fine
    plan = plan_load(open_folder(write_folder(arrays)), config)
    loaded = load_parameters(plan, abstract_parameters(config))
    np.testing.assert_array_equal(loaded["layers.0.linear_attn.A_log"], fine)


def test_dtype_of_the_configuration_is_the_default(tiny):
    assert abstract_parameters(tiny("qwen3"))["norm.weight"].dtype == jnp.bfloat16
    assert abstract_parameters(tiny("qwen3", dtype="float32"))["norm.weight"].dtype == jnp.float32


@pytest.mark.parametrize("dtype", ["float16", "int8", "", "torch.bfloat16"])
def test_other_model_dtypes_are_refused(tiny, dtype):
    with pytest.raises(CheckpointError, match="accepted: bfloat16, float32"):
        abstract_parameters(tiny("qwen3"), dtype)


def test_arrays_do_not_alias_the_file(released):
    tree, plan = released
    arrays = load_parameters(plan, abstract_parameters(plan.config, "bfloat16"))
    for shard in plan.folder.shards:
        with (plan.folder.path / shard).open("r+b") as stream:
            size = stream.seek(0, 2)
            stream.seek(0)
            stream.write(b"\xff" * size)
    for path, array in arrays.items():
        np.testing.assert_array_equal(np.asarray(array).astype(np.float32), tree[path])


def test_arrays_lie_where_the_targets_say(released):
    _, plan = released
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[-1])
    targets = {
        path: jax.ShapeDtypeStruct(target.shape, target.dtype, sharding=sharding)
        for path, target in abstract_parameters(plan.config).items()
    }
    assert all(a.sharding == sharding for a in load_parameters(plan, targets).values())


def test_progress_reports_each_tensor_once(released):
    _, plan = released
    seen = []
    targets = abstract_parameters(plan.config)
    load_parameters(plan, targets, progress=lambda path, size: seen.append((path, size)))
    assert seen == [(p, math.prod(t.shape) * t.dtype.itemsize) for p, t in targets.items()]


def test_targets_that_are_not_the_planned_tree_are_refused(released):
    _, plan = released
    targets = abstract_parameters(plan.config)
    targets["norm.weight"] = jax.ShapeDtypeStruct((17,), jnp.float32)
    targets["extra"] = jax.ShapeDtypeStruct((1,), jnp.float32)
    del targets["lm_head.weight"]
    with pytest.raises(CheckpointError, match="targets are not") as caught:
        load_parameters(plan, targets)
    for part in ("lm_head.weight", "extra", "norm.weight is [16], the target [17]"):
        assert part in str(caught.value)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("experts", ["fused", "per_expert"])
def test_host_memory_is_that_of_two_tensors(
    tiny, random_tree, stored, write_folder, monkeypatch, dtype, experts
):
    sizes = {"num_experts": 32, "moe_intermediate_size": 64, "hidden_size": 64}
    config = tiny("qwen3_moe", decoder_sparse_step=1, num_hidden_layers=6, **sizes)
    arrays = stored(config, random_tree(config), Layout(experts=experts))
    plan = plan_load(open_folder(write_folder(arrays)), config)
    del arrays
    targets = abstract_parameters(config, dtype)
    bytes_of = [math.prod(t.shape) * t.dtype.itemsize for t in targets.values()]
    # On a CPU the device's memory can be the very array that was given; elsewhere it is another's.
    device = jnp.zeros(())
    monkeypatch.setattr(jax, "device_put", lambda host, sharding: device)
    tracemalloc.start()
    try:
        load_parameters(plan, targets)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert sum(bytes_of) > 8 * max(bytes_of)
    assert peak < 2 * max(bytes_of) + 200_000
