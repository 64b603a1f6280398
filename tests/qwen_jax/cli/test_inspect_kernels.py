"""`qwen-jax inspect --kernels`: what would run, without running it."""

from __future__ import annotations

import dataclasses
import json

import jax
import pytest

from qwen_jax.cli.kernels import kernels
from qwen_jax.cli.measure import first_layers
from qwen_jax.config import QwenConfig
from qwen_jax.model import parameter_shapes
from qwen_jax.quant import named_recipe, scheme_of


def report(run, *arguments: str) -> dict:
    outcome = run("inspect", "demo", "--kernels", *arguments, "--json")
    assert (outcome.code, outcome.err) == (0, "")
    return json.loads(outcome.out)["kernels"]


def by_operation(rows: list[dict]) -> dict[str, dict]:
    return {row["operation"]: row for row in rows}


def test_this_machine_runs_the_references_and_says_why(run):
    found = report(run, "--batch-size", "3")
    for phase, tokens in (("prefill", 512), ("decode", 1)):
        rows = found["phases"][phase]
        assert {row["implementation"] for row in rows} == {"reference"}
        delta = by_operation(rows)["delta_rule"]
        assert delta["arrays"]["qkv"].startswith(f"float32[3, {tokens}, ")
        assert "it needs a GPU, and the call is for cpu" in delta["refused"]["triton"]


def test_a_described_device(run, demo_path):
    found = report(run, "--device", "h200", "--dtype", "bfloat16")
    assert found["device"] == "NVIDIA H200"
    decode = by_operation(found["phases"]["decode"])
    assert decode["delta_rule"]["implementation"] == "triton"
    kinds = QwenConfig.from_hf(demo_path).layer_types
    assert decode["delta_rule"]["calls"] == kinds.count("linear_attention")
    assert decode["block_attention"]["calls"] == kinds.count("full_attention")


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "qwen3-next-80b-a3b"])
def test_released_shapes_in_codes_run_on_kernels(name):
    config = first_layers(QwenConfig.preset(name), 4)
    config = dataclasses.replace(config, dtype="bfloat16")
    scheme = scheme_of(parameter_shapes(config), named_recipe("q3"))
    phases = kernels(config, scheme, 32, None, "h200")["phases"]
    for phase in ("decode", "prefill"):
        rows = phases[phase]
        assert {row["operation"] for row in rows} >= {"expert_dispatch", "router", "dequant_matmul"}
        for row in rows:
            streams = phase == "decode" and row["operation"] == "expert_dispatch"
            newer = jax.__version_info__ >= (0, 11)
            kernel = "mosaic_gpu" if streams and newer else "triton"
            # The norm under a gate is left to XLA by name.
            assert row["implementation"] == kernel or row["named"], row


def test_text_and_a_refused_implementation(run):
    outcome = run("inspect", "demo", "--kernels", "--implementation", "triton")
    assert (outcome.code, outcome.err) == (0, "")
    assert "REFUSED" in outcome.out
    assert "not triton: it needs a GPU, and the call is for cpu" in outcome.out


@pytest.mark.parametrize("flag", [("--device", "h200"), ("--implementation", "reference")])
def test_flags_of_kernels_alone(run, flag):
    outcome = run("inspect", "demo", *flag)
    assert outcome.code == 2
    assert "--kernels" in outcome.err


def test_a_named_implementation_runs_or_fails(run):
    plain = run("generate", "demo", "--prompt", "And", "--max-tokens", "4", "--temperature", "0")
    named = run(
        *("generate", "demo", "--prompt", "And", "--max-tokens", "4", "--temperature", "0"),
        *("--implementation", "reference"),
    )
    assert (named.code, named.out) == (0, plain.out)
    refused = run("generate", "demo", "--prompt", "And", "--implementation", "triton")
    assert (refused.code, refused.out) == (1, "")
    assert refused.err.count("triton: it needs a GPU, and the call is for cpu") == 1
    assert "Traceback" not in refused.err
