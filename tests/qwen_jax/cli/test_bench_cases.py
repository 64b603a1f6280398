"""`benchmarks/bench_cases.py`: which cases it takes, and what it writes of them."""

from __future__ import annotations

import json
import logging
import re

import jax
import jax.numpy as jnp
import pytest

from benchmarks import ballast, bench_cases, report
from qwen_jax.cli.bench_request import BenchRequest
from qwen_jax.cli.console import Notes
from qwen_jax.cli.measure import prepare
from qwen_jax.cli.report import as_text
from qwen_jax.cli.trials import Samples, Trials


@pytest.mark.parametrize(
    ("case", "name", "arguments"),
    [
        ("q3", "q3-b1", "qwen3.6-35b-a3b --recipe q3"),
        ("q3-b1-p512-g128", "q3-b1", "qwen3.6-35b-a3b --recipe q3"),
        ("q3-small-b8", "q3-small-b8", "qwen3.6-35b-a3b --batch-size 8 --recipe q3-small"),
        ("qwen3-30b-a3b/bf16", "qwen3-30b-a3b-bf16-b1", "qwen3-30b-a3b"),
        (
            "/a/b c/q4-b2-p64-g16",
            "a-b-c-q4-b2-p64-g16",
            "/a/b c --prompt-tokens 64 --generation-tokens 16 --batch-size 2 --recipe q4",
        ),
    ],
)
def test_case_is_a_request(case, name, arguments):
    request = bench_cases.parse(case, num_trials=5)
    assert bench_cases.name_of(request) == name
    words = [word for word in request.arguments() if word != "--dummy"]
    assert " ".join(words) == arguments
    assert request.dummy


def test_cut_model_has_a_name_of_its_own():
    assert bench_cases.name_of(bench_cases.parse("q3", num_layers=2)) == "q3-b1-2-layers"


def test_cases_of_the_table_replace_files_of_the_table():
    kept = {path.stem for path in (bench_cases.RESULTS / "h200").glob("bench-*.json")}
    names = {bench_cases.name_of(bench_cases.parse(case)) for case in bench_cases.CASES}
    assert {f"bench-{name}" for name in names} <= kept


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("q5-b8", "case 'q5-b8': there is no recipe 'q5'; accepted is [MODEL/]RECIPE[-bROWS]"),
        ("q3-b2-b3", "no recipe 'q3-b2'"),
        ("q3-g8-b2", "no recipe 'q3-g8'"),
        ("", "with one of the recipes bf16, q3, "),
        ("demo/", "case 'demo/'"),
        ("q3-b0", "case 'q3-b0': --batch-size is 0; accepted is a whole number from 1 on"),
        ("nothing/q3", "there is no folder and no preset 'nothing'"),
        ("demo/bf16-p8065", "8193, but the context of demo is 8192"),
    ],
)
def test_another_case_is_refused_before_any_is_measured(capsys, tmp_path, case, words):
    assert bench_cases.main(["demo/bf16", case, "--folder", str(tmp_path / "out")]) == 2
    out, err = capsys.readouterr()
    assert out == "" and words in err
    assert not (tmp_path / "out").exists()


def test_results_are_those_of_bench(capsys, tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    cases = [f"{tiny}/bf16-p20-g4", f"{tiny}/bf16-b2-p20-g4"]
    options = ["--num-trials", "1", "--num-layers", "1", "--ahead", "--commit", "abc"]
    assert bench_cases.main([*cases, *options]) == 0
    files = sorted((tmp_path / "out").iterdir())
    assert [re.sub(r".*-bf16", "", path.name) for path in files] == [
        "-b2-p20-g4-1-layers.json",
        "-p20-g4-1-layers.json",
    ]
    out, err = capsys.readouterr()
    assert err.count("random weights") == 1
    assert "compilation" not in out and "\nlimit " in out
    result = json.loads(files[0].read_text())
    figures = result["figures"]
    assert result["command"] == (
        f"python benchmarks/bench.py {tiny} --dummy --prompt-tokens 20 --generation-tokens 4 "
        "--batch-size 2 --num-trials 1 --num-layers 1"
    )
    assert figures["compile_seconds"] is None and figures["compilation"] is None
    # On a host no peak but a process's first is a case's own.
    assert figures["peak_memory_bytes"] is None
    assert "start_seconds" not in figures
    assert result["commit"]
    assert report._compiled(figures) == "" and report._peak(None) == ""
    assert as_text(result) in out


def test_one_case_is_wholly_what_bench_gives(tiny, tmp_path, capsys):
    options = ["--num-trials", "1", "--folder", str(tmp_path)]
    # Of a shape that no other test has compiled.
    assert bench_cases.main([f"{tiny}/bf16-b3-p20-g4", *options]) == 0
    (path,) = tmp_path.iterdir()
    figures = json.loads(path.read_text())["figures"]
    assert figures["compile_seconds"] > 0 and figures["start_seconds"] > 0
    assert figures["peak_memory_bytes"] > 0


def test_cases_fail_alone_and_end_with_the_time(tiny, tmp_path, capsys, monkeypatch):
    options = ["--num-trials", "1", "--folder", str(tmp_path)]
    assert bench_cases.main([f"{tiny}/bf16-p20-g4", *options, "--seconds", "0"]) == 0
    assert "not begun, since 0 seconds are over" in capsys.readouterr().err

    def fail(self, request, commit):
        raise RuntimeError("no memory")

    monkeypatch.setattr(bench_cases.Session, "result", fail)
    assert bench_cases.main([f"{tiny}/bf16-p20-g4", f"{tiny}/bf16-b2-p20-g4", *options]) == 1
    assert capsys.readouterr().err.count("failed: RuntimeError: no memory") == 2
    assert list(tmp_path.iterdir()) == []


def test_programs_compiled_ahead_are_found(tiny, caplog):
    # Two chunks of different widths.
    request = BenchRequest(
        model=tiny, dummy=True, prompt_tokens=37, generation_tokens=3, prefill_chunk_size=32
    )
    trials = Trials(prepare(request, Notes(quiet=True)).model, request)
    for program in trials.programs():
        program.compile()
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        trials.trial(Samples())
        compiled = re.findall(r"Finished XLA compilation of jit\((\w+)\)", caplog.text)
        assert not {"run_prefill", "run_steps"} & set(compiled)
        jax.jit(lambda x: x + 17, inline=True)(jnp.ones(3))
    assert "Finished XLA compilation" in caplog.text


def test_ballast_shows_each_peak(monkeypatch):
    memory = {"limit": 100, "used": 10, "peak": 40}
    monkeypatch.setattr(ballast, "accelerator_memory", lambda: memory["limit"])
    monkeypatch.setattr(ballast, "available_memory", lambda: memory["limit"] - memory["used"])
    monkeypatch.setattr(ballast, "peak_memory", lambda: memory["peak"])
    monkeypatch.setattr(ballast, "PIECE", 8)
    monkeypatch.setattr(ballast, "KEPT_FREE", 20)
    held = ballast.Ballast()
    held.fill(beside=30)
    # 30 bytes up to the peak; the case then takes 15 beside the 10 that are used.
    assert held.own(55) == 25
    # 10 bytes short of what the case may need: only a new peak is its own.
    held.fill(beside=41)
    assert held.own(40) is None
    assert held.own(41) == 41
    memory["limit"] = None
    held.fill(beside=0)
    assert held.own(50) is None


def test_folder_of_a_device(monkeypatch):
    monkeypatch.delenv("OUT", raising=False)
    assert bench_cases._folder("NVIDIA H200") == bench_cases.RESULTS / "h200"
