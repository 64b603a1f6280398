"""What `benchmarks/kernels/compile_for_gpu.py` compiles, as far as that goes without its plugin."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import itertools
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from benchmarks.kernels import compile_for_gpu
from benchmarks.kernels.compile_for_gpu import OPERATIONS, cases
from benchmarks.kernels.devices import DEVICES
from pallas_kernels import _compat
from pallas_kernels.attention.cut import cut_for, shared_bytes
from pallas_kernels.delta_rule.config import pass_config
from pallas_kernels.expert_dispatch import many_tokens_config

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "kernels" / "compile_for_gpu.py"


# Their own tests lower every spec; here one shows that cases are made of them.
LOWERED = {"attention_inputs", "dequant_matmul", "flash_attention", "rms_norm", "router"}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_spec_is_a_call_of_the_kernel(operation):
    found = 0
    selected = itertools.islice(
        cases(f"{operation}: ", DEVICES["h200"]), 1 if operation in LOWERED else None
    )
    with _compat.targeting(_compat.H200):
        for label, call, arguments in selected:
            assert jax.tree.leaves(jax.eval_shape(call, *arguments)), label
            found += 1
    assert found


def test_devices_are_those_that_kernels_know():
    assert DEVICES["h200"].target == _compat.H200
    for device in DEVICES.values():
        assert device.target.shared_memory == 1024 * (device.shared_kib - 1)
        assert f"shared_memory_per_block_optin: {device.target.shared_memory}\n" in device.text
    assert [DEVICES[x].architecture for x in ("h200", "4090")] == ["sm_90a", "sm_89"]


@pytest.mark.parametrize("device", ["a10", "4090"])
def test_smaller_cards_get_smaller_tiles(device):
    small, large = DEVICES[device].target, DEVICES["h200"].target
    for target, tile, warps in ((small, 32, 8), (large, 64, 4)):
        q = jax.ShapeDtypeStruct((1, 8192, 16, 256), jnp.bfloat16)
        cut = cut_for(target, q, 2)
        assert shared_bytes(cut.rows, cut.tile, cut.num_stages, 256, False) <= target.shared_memory
        qkv = jax.ShapeDtypeStruct((1, 512, 8192), jnp.bfloat16)
        state = jax.ShapeDtypeStruct((1, 32, 128, 128), jnp.float32)
        found = pass_config(target, qkv, state)
        assert (found.tile, found.num_warps) == (tile, warps)
        assert many_tokens_config.heuristic(target, 8192, 8, 256).gate_up.outputs == 2 * tile
    assert cut_for(small, q, 2).num_warps == 8 and cut_for(small, q, 2).tile == 32


@pytest.mark.parametrize(
    ("registers", "shared", "threads", "programs"),
    [(32, 0, 128, 16), (129, 0, 128, 3), (32, 100 * 1024, 128, 2), (8, 0, 1024, 2)],
)
def test_programs_on_a_multiprocessor(registers, shared, threads, programs):
    assert DEVICES["h200"].resident(registers, shared, threads) == programs


def test_unknown_cases_are_named():
    command = [sys.executable, SCRIPT, "--only", "no such case"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 2
    assert "no case has 'no such case' in its name" in run.stderr


@pytest.mark.parametrize("folder", ["cu13", "cuda_nvcc"])
def test_the_assembler_is_found_where_either_cuda_has_it(monkeypatch, tmp_path, folder):
    """The folder of all of NVIDIA's packages may be in several places."""
    path = tmp_path / "second" / "nvidia" / folder / "bin" / "ptxas"
    for file in (path, tmp_path / "first" / "nvidia" / "cublas" / "bin" / "other"):
        file.parent.mkdir(parents=True)
        file.touch()
    spec = importlib.machinery.ModuleSpec("nvidia", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path / x / "nvidia") for x in ("first", "second")]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    assert compile_for_gpu._assembler() == path


def test_without_an_assembler_both_ways_to_have_one_are_said(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as caught:
        compile_for_gpu._assembler()
    for words in ("jax-cuda12-pjrt==", "nvidia-cuda-nvcc-cu12", "jax-cuda13-pjrt==", "nvidia-nvvm"):
        assert words in str(caught.value)


@pytest.mark.parametrize("serial", [False, True])
def test_tensor_cores_that_are_waited_for_are_said(tmp_path, serial):
    why = "wgmma.mma_async instructions are serialized due to insufficient register resources"
    lines = [f"ptxas info : (C7512) Potential Performance Loss: {why} for the function 'mine'"]
    lines = lines * serial + [
        "ptxas info : Function properties for mine",
        "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads",
        "ptxas info : Used 96 registers, used 16 barriers",
    ]
    assembler, ptx = tmp_path / "ptxas", tmp_path / "mine.ptx"
    text = "\n".join(lines)
    assembler.write_text(f'#!/bin/sh\ncat >&2 <<"END"\n{text}\nEND\n')
    assembler.chmod(0o755)
    ptx.write_text(".visible .entry mine()\n.maxntid 640, 1, 1\n")
    ptx.with_suffix(".resources.txt").write_text("smem_scratch_bytes=1024")
    [found] = compile_for_gpu._kernels([ptx], DEVICES["h200"], assembler)
    assert found["serial"] == serial
    assert (found["registers"], found["spills"]) == (96, 0)
