"""`qwen-jax bench`: what it measures and refuses; not how fast this machine is."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from qwen_jax.cli import report
from qwen_jax.cli.bench_request import BenchRequest
from qwen_jax.cli.measure import first_layers
from qwen_jax.cli.report import as_text
from qwen_jax.cli.start_up import compilation
from qwen_jax.cli.trials import spread
from qwen_jax.compile_time import CompileTime
from qwen_jax.config import QwenConfig
from qwen_jax.errors import RequestError
from tests import compiling

ROOT = Path(__file__).parents[3]
SMALL = (
    "--prompt-tokens", "20", "--generation-tokens", "5", "--batch-size", "2", "--num-trials", "2",
    "--prefill-chunk-size", "16", "--kv-cache-dtype", "int8",
)  # fmt: skip


def test_result_is_fit_to_be_kept(run, tiny):
    outcome = run("bench", tiny, *SMALL, "--json")
    assert outcome.code == 0, outcome.err
    result = json.loads(outcome.out)
    figures = result["figures"]
    assert shlex.split(result["command"]) == ["qwen-jax", "bench", tiny, *SMALL]
    assert {"platform", "kind", "count"} <= result["device"].keys()
    assert {"jax", "jaxlib", "python", "qwen_jax"} <= result["versions"].keys()
    assert result["request"]["batch_size"] == 2
    assert {name: value["count"] for name, value in figures.items() if "count" in str(value)} == {
        "prefill_seconds": 4,
        "first_token_seconds": 4,
        "inter_token_seconds": 8,
        "loop_seconds_per_token": 2,
    }
    assert 0 < figures["prefill_seconds"]["median"] < figures["first_token_seconds"]["median"]
    assert figures["decode_tokens_per_second"] == pytest.approx(
        2 / figures["loop_seconds_per_token"]["median"]
    )
    assert figures["prefill_tokens_per_second"] == pytest.approx(
        40 / figures["prefill_seconds"]["median"]
    )
    assert figures["weight_bytes"] == 4 * (
        4096 * 32 + 32 * 32 * 2 + 16 * 32 * 2 + 3 * 32 * 32 + 128
    )
    assert figures["peak_memory_bytes"] > 0
    assert figures["model"]["weights"] == "loaded"
    check_limit(figures, experts=0)
    assert figures["experts"] is None
    assert figures["profile"] == {
        "absent": "kernels are told apart on a GPU alone, and this is a cpu"
    }
    assert figures["compilation"]["start"] in ("cold", "warm")
    assert figures["compilation"]["cold_seconds"] >= figures["compile_seconds"] > 0
    assert figures["start_seconds"] > figures["first_token_seconds"]["median"]
    assert "compiled in" in outcome.err and "trial 2 of 2" in outcome.err
    text = as_text(result)
    check_table(text, "1 layers, float32, loaded weights")
    assert "keys and values in int8" in text


def test_random_weights_in_codes(run, write_tiny, tmp_path):
    wide = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 512}
    wide |= {"head_dim": 32, "eos_token_id": 1}
    folder = write_tiny(tmp_path / "wide", tokenizer=False, **wide)
    outcome = run("bench", str(folder), "--dummy", "--recipe", "q3", *SMALL, "--json")
    assert outcome.code == 0, outcome.err
    result = json.loads(outcome.out)
    assert (result["figures"]["model"]["recipe"], result["figures"]["model"]["bits"]) == ("q3", 3)
    # Codes and scales of the embedding, q and o, k and v, gate and up, down; float32 norms.
    embedding = 512 * (2 * 4 * 4 + 2 * 2)
    attention = (64 + 2 * 32 + 64) * (2 * 4 * 4 + 2)
    mlp = 2 * 96 * (2 * 3 * 4 + 2) + 64 * (3 * 3 * 4 + 2 * 2)
    norms = 4 * (3 * 64 + 2 * 32)
    assert outcome.err.count("random weights") == 1
    expected = embedding + attention + mlp + norms
    assert result["figures"]["weight_bytes"] == expected
    check_table(as_text(result), "1 layers, float32, random weights, recipe q3 of 3 bits")


def check_limit(figures: dict, experts: int) -> None:
    limit = figures["limit"]
    assert limit["bytes_per_step"] == sum(limit["parts"].values())
    assert limit["parts"]["experts"] == experts
    # Behind the prompt, halfway through the generation.
    assert limit["context"] == 20 + 5 // 2
    step = figures["loop_seconds_per_token"]["median"]
    moved = limit["copy_bytes_per_second"] * limit["share"] * step
    assert moved == pytest.approx(limit["bytes_per_step"])


def check_table(text: str, weights: str) -> None:
    rows = ("prefill", "first token", "inter-token", "loop", "peak memory", "compilation")
    for row in (*rows, "start", "limit", "profile"):
        assert f"\n{row} " in text
    assert weights in text


def test_too_large_a_model_is_refused_with_both_numbers(run):
    outcome = run("bench", "qwen3.5-397b-a17b", "--dummy", "--dtype", "bfloat16")
    assert (outcome.code, outcome.out) == (1, "")
    assert "GB are available on" in outcome.err and "needs 8" in outcome.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("qwen3.6-35b-a3b",), "add --dummy"),
        (("demo", "--num-layers", "2"), "add --dummy"),
        (("demo", "--dummy", "--num-layers", "5"), "--num-layers: 5 layers of a model that has 4"),
        (("demo", "--num-trials", "0"), "--num-trials is 0"),
        (("demo", "--generation-tokens", "1"), "--generation-tokens is 1"),
        (("demo", "--prompt-tokens", "0"), "--prompt-tokens is 0"),
        (("demo", "--batch-size", "0"), "--batch-size is 0"),
        (("demo", "--max-model-len", "100"), "--max-model-len is 100"),
        (("demo", "--prompt-tokens", "8065"), "--generation-tokens 128 need 8193, but the context"),
        (("demo", "--recipe", "q3"), "add --dummy"),
        (("demo", "--recipe", "q5", "--dummy"), "q3, q3-small, q4, q8, experts-only"),
    ],
)
def test_bad_request_is_refused(run, arguments, words):
    outcome = run("bench", *arguments)
    assert (outcome.code, outcome.out) == (2, "")
    assert words in outcome.err


def test_first_layers_keep_their_kinds_and_widths():
    config = QwenConfig.preset("qwen3.6-35b-a3b")
    cut = first_layers(config, 5)
    assert cut.num_hidden_layers == 5
    assert cut.layer_types == config.layer_types[:5]
    fields = {"mlp_only_layers": [0, 30], "moe_intermediate_size": [512] * 48}
    named = QwenConfig.preset("qwen3-30b-a3b").to_hf() | fields
    cut = first_layers(QwenConfig.from_hf(named), 2)
    assert cut.mlp_only_layers == (0,)
    assert cut.moe_intermediate_size == (512, 512)
    with pytest.raises(RequestError, match="41 layers of a model that has 40"):
        first_layers(config, 41)


def test_experts_and_profile_in_the_table():
    experts = {"experts": 256, "per_token": 8, "expected_distinct": 57.42}
    text = report._experts(experts, "random")
    assert text.startswith("8 of 256 a token and layer; 57.4 different ones") and "evenly" in text
    part = {"seconds": 2e-3, "launches": 99.0, "gaps": 0.5e-3}
    part["groups"] = {"experts": 0.5e-3, "head": 1e-3, "router": 0.0}
    rows = report._profile({"step": part, "prefill": part})
    assert rows["step time"] == (
        "2.000 ms, 99 launches: head 1.000 ms (50%), experts 0.500 ms (25%), gaps 0.500 ms (25%)"
    )


def test_warm_and_cold_starts():
    cold = CompileTime(90.0, 60.0, 5.0, 2) - CompileTime(50.0, 50.0, 5.0, 2)
    found = compilation(CompileTime(), cold)
    assert (found["start"], found["cold_seconds"]) == ("cold", 40.0)
    # 0.5 s are a program that is not kept.
    found = compilation(CompileTime(), CompileTime(12.0, 0.5, 30.0, 4))
    assert (found["start"], found["cold_seconds"], found["programs_read"]) == ("warm", 42.0, 4)


def test_arguments_repeat_the_request():
    assert BenchRequest(model="demo").arguments() == ["demo"]
    request = BenchRequest(model="m", dummy=True, dtype="float32", num_layers=2)
    assert request.arguments() == ["m", "--dummy", "--num-layers", "2", "--dtype", "float32"]


def test_spread():
    assert spread([3.0, 1.0, 2.0]) == {"median": 2.0, "p99": pytest.approx(2.98), "count": 3}


def test_script_needs_no_command_line_library(tiny, tmp_path):
    output = tmp_path / "results" / "bench.json"
    program = (
        "import runpy, sys\n"
        "from tests.compiling import emit_quickly\n"
        "emit_quickly()\n"
        "sys.modules.update(cyclopts=None)\n"
        "sys.argv = ['benchmarks/bench.py', *sys.argv[1:]]\n"
        "runpy.run_path('benchmarks/bench.py', run_name='__main__')"
    )
    options = ["--dummy", "--num-layers", "1", "--commit", "abc", "--output", str(output)]
    command = [sys.executable, "-c", program, tiny, *SMALL, *options]
    quick = compiling.environment()
    done = subprocess.run(command, cwd=ROOT, env=quick, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    check_table(done.stdout, "1 layers, float32, random weights")
    result = json.loads(output.read_text())
    assert result["command"].startswith("python benchmarks/bench.py ")
    assert result["figures"]["model"]["weights"] == "random"
    assert result["commit"]


def test_script_refuses_as_the_command_does():
    command = [sys.executable, "benchmarks/bench.py", "demo", "--num-trials", "0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: --num-trials is 0; accepted is a whole number from 1 on\n"
