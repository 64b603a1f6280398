"""`qwen-jax generate`: what it writes, and where."""

from __future__ import annotations

import json
import math

import pytest

from qwen_jax import GenerationResult, generate
from qwen_jax.loading import load

PROMPT = "And Moses said unto"


def generated(model: str, prompt, **options) -> GenerationResult:
    loaded, tokenizer = load(model, dtype="float32")
    return generate(loaded, tokenizer, prompt, **options)


def test_text_goes_to_stdout_and_all_else_to_stderr(run, tiny):
    outcome = run("generate", tiny, "--prompt", PROMPT, "--max-tokens", "8")
    expected = generated(tiny, PROMPT, max_tokens=8).text
    assert outcome.code == 0
    assert outcome.out == expected + "\n" * (not expected.endswith("\n"))
    lines = outcome.err.splitlines()
    assert [line for line in lines if line.startswith("loading ")] == [
        f"loading {tiny}: 13 tensors, 549.4 kB, as float32"
    ]
    assert lines.index("compiling ...") < next(
        n for n, line in enumerate(lines) if line.startswith("compiled in ")
    )
    rule, prompt, generation, peak = lines[-4:]
    assert rule == "=========="
    assert prompt.startswith("Prompt: 4 tokens, ") and prompt.endswith(" tokens-per-sec")
    assert generation.startswith("Generation: 8 tokens, ")
    assert peak.startswith("Peak memory: ") and peak.endswith(" GB")


def test_int8_cache_is_used(run, tiny):
    arguments = ("--prompt", PROMPT, "--max-tokens", "8", "--json", "--logprobs", "-q")
    outcome = run("generate", tiny, *arguments, "--kv-cache-dtype", "int8")
    assert (outcome.code, outcome.err) == (0, "")
    found = json.loads(outcome.out)["logprobs"]
    exact = generated(tiny, PROMPT, max_tokens=8).logprobs
    assert found == pytest.approx(exact, abs=0.05)
    assert found != pytest.approx(exact, abs=1e-5)


def test_quiet_writes_nothing_to_stderr(run, tiny):
    outcome = run("generate", tiny, "--prompt", PROMPT, "--max-tokens", "8", "--quiet")
    assert outcome.err == ""
    assert outcome.out


def test_prompt_from_standard_input_is_used_as_it_is(run, tiny):
    given = run("generate", tiny, "--prompt", PROMPT + "\n", "--max-tokens", "8", "-q")
    piped = run(
        "generate", "--model", tiny, "--prompt", "-", "--max-tokens", "8", "-q",
        stdin=f"{PROMPT}\n".encode(),
    )  # fmt: skip
    assert piped == given


def test_json_is_one_strict_object(run, tiny):
    arguments = ["--prompt", PROMPT, "--max-new-tokens", "8", "--json", "--logprobs"]
    outcome = run("generate", tiny, *arguments)
    expected = generated(tiny, PROMPT, max_tokens=8)

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    result = json.loads(outcome.out, parse_constant=refuse)
    assert result["text"] == expected.text
    assert result["tokens"] == expected.tokens
    assert result["logprobs"] == pytest.approx(expected.logprobs, abs=1e-6)
    assert result["finish_reason"] == "length"
    assert (result["prompt_tokens"], result["generation_tokens"]) == (4, 8)
    assert result["dtype"] == "float32"
    assert result["peak_memory_bytes"] > 0
    assert "compiled in" in outcome.err


def test_logprobs_without_json_stand_on_stderr(run, tiny):
    outcome = run("generate", tiny, "--prompt", PROMPT, "--max-tokens", "8", "--logprobs", "-q")
    ids = [int(line.split()[0]) for line in outcome.err.splitlines()]
    assert ids == generated(tiny, PROMPT, max_tokens=8).tokens
    assert all(float(line.split()[1]) < 0 for line in outcome.err.splitlines())


def test_no_new_tokens_give_no_text(run, tiny):
    outcome = run("generate", tiny, "--prompt", PROMPT, "--max-tokens", "0")
    assert (outcome.code, outcome.out) == (0, "")
    assert "Generation: 0 tokens" in outcome.err


def test_stop_may_be_repeated(run, tiny):
    text = generated(tiny, PROMPT, max_tokens=8).text
    stop = text[len(text) // 2]
    outcome = run(
        "generate", tiny, "--prompt", PROMPT, "--max-tokens", "8",
        "--stop", "no such text", "--stop", stop, "--json",
    )  # fmt: skip
    result = json.loads(outcome.out)
    assert result["text"] == text[: text.index(stop)]
    assert result["finish_reason"] == "stop"


def test_sampling_defaults_come_from_the_folder_and_flags_replace_one_each(
    run, write_tiny, tmp_path
):
    folder = write_tiny(tmp_path / "model")
    recommended = {"do_sample": True, "temperature": 5.0, "top_k": 1}
    (folder / "generation_config.json").write_text(json.dumps(recommended))
    base = ("generate", str(folder), "--prompt", PROMPT, "--max-tokens", "8", "-q", "--seed", "3")
    greedy = generated(str(folder), PROMPT, max_tokens=8).text.rstrip("\n")
    assert run(*base).out.rstrip("\n") == greedy
    free = run(*base, "--top-k", "0").out
    assert free.rstrip("\n") != greedy
    assert run(*base, "--top-k", "0").out == free
    assert run(*base, "--top-k", "-1", "--temp", "0").out.rstrip("\n") == greedy


def test_temperature_works_on_a_greedy_folder(run, tiny):
    arguments = ("generate", tiny, "--prompt", PROMPT, "--max-tokens", "8", "-q")
    drawn = run(*arguments, "--temperature", "5", "--seed", "1")
    assert drawn.code == 0
    assert drawn.out != run(*arguments).out


def test_flag_without_effect_is_told(run, tiny):
    outcome = run("generate", tiny, "--prompt", PROMPT, "--max-tokens", "0", "--top-p", "0.9")
    assert "temperature is 0 (greedy), so --top-p has no effect" in outcome.err


def test_chat_applies_the_template(run, tiny):
    outcome = run(
        "generate", tiny, "--chat", "--prompt", "hi", "--no-enable-thinking", "--system-prompt",
        "be", "--max-tokens", "0", "--json",
    )  # fmt: skip
    _, tokenizer = load(tiny)
    assert tokenizer is not None
    messages = [{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}]
    prompt = tokenizer.apply_chat_template(messages, enable_thinking=False)
    assert json.loads(outcome.out)["prompt_tokens"] == len(tokenizer.encode(prompt))


def test_folder_without_tokenizer_takes_and_gives_ids(run, write_tiny, tmp_path):
    # As many end tokens as with the tokenizer, so that nothing is compiled anew.
    folder = str(write_tiny(tmp_path / "ids", tokenizer=False, eos_token_id=[4089, 4091]))
    outcome = run("generate", folder, "--prompt-ids", "5, 17 3", "--max-tokens", "8")
    expected = generated(folder, [5, 17, 3], max_tokens=8)
    assert [int(token) for token in outcome.out.split()] == expected.tokens
    assert "Prompt: 3 tokens" in outcome.err


def test_cpu_default_dtype_is_float32_and_said(run, write_tiny, tmp_path):
    folder = str(write_tiny(tmp_path / "bf16", dtype="bfloat16"))
    arguments = ("generate", folder, "--prompt", PROMPT, "--max-tokens", "0")
    default = run(*arguments)
    assert "float32 on this CPU" in default.err
    assert "as float32" in default.err
    kept = run(*arguments, "--dtype", "bfloat16")
    assert "float32" not in kept.err
    assert "as bfloat16" in kept.err


def test_skipped_tensors_are_counted(run, write_tiny, tmp_path):
    from safetensors.numpy import load_file, save_file

    folder = write_tiny(tmp_path / "mtp")
    arrays = load_file(folder / "model.safetensors")
    arrays["mtp.fc.weight"] = arrays["model.norm.weight"].copy()
    save_file(arrays, folder / "model.safetensors")
    outcome = run("generate", str(folder), "--prompt", PROMPT, "--max-tokens", "0")
    assert "skipped 1 mtp tensors" in outcome.err


def test_json_has_no_number_that_json_lacks(capsys):
    from qwen_jax.cli.console import write_json

    write_json({"a": math.nan, "b": [math.inf, 1.5], "c": {"d": -math.inf}})
    assert json.loads(capsys.readouterr().out) == {"a": None, "b": [None, 1.5], "c": {"d": None}}
