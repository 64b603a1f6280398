"""Wrong usage ends with code 2 and failure with code 1: one clear message, nothing on stdout."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

PROMPT = ("--prompt", "And Moses said unto")
USAGE, FAILURE = 2, 1


def refused(outcome, code: int, *words: str) -> None:
    assert outcome.out == ""
    assert outcome.code == code, outcome.err
    assert "Traceback" not in outcome.err
    (message,) = [line for line in outcome.err.splitlines() if line.startswith("error: ")]
    rest = outcome.err[outcome.err.index(message) :]
    assert [word for word in words if word not in rest] == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--temperature", "-0.5"), ["--temperature is -0.5", "0 (greedy)"]),
        (("--temp", "nan"), ["--temperature is nan"]),
        (("--temp", "inf"), ["--temperature is inf"]),
        (("--temp", "warm"), ["--temp", "warm"]),
        (("--top-p", "1.5"), ["--top-p is 1.5", "from 0 to 1"]),
        (("--top-p", "-0.1"), ["--top-p is -0.1"]),
        (("--top-k", "-2"), ["--top-k is -2", "0 or -1"]),
        (("--top-k", "2.5"), ["--top-k", "2.5", "whole number"]),
        (("--min-p", "2"), ["--min-p is 2"]),
        (("--repetition-penalty", "0"), ["--repetition-penalty is 0"]),
        (("--presence-penalty", "nan"), ["--presence-penalty is nan"]),
        (("--seed", "-1"), ["--seed is -1"]),
        (("--max-tokens", "-1"), ["--max-tokens is -1", "from 0 on"]),
        (("--max-tokens", "many"), ["--max-tokens", "many"]),
        (
            ("--max-tokens", "1000"),
            ["4 tokens and --max-tokens 1000", "context is 128", "--max-model-len"],
        ),
        (("--max-model-len", "0"), ["--max-model-len is 0"]),
        (("--max-model-len", "4", "--max-tokens", "1"), ["4 tokens", "context is 4"]),
        (("--prefill-chunk-size", "0"), ["--prefill-chunk-size is 0"]),
        (("--kv-cache-dtype", "fp8"), ["fp8", "auto", "int8"]),
        (("--stop", ""), ["stop string is empty"]),
        (("--stop", "\udcff"), ["stop string", "U+DCFF"]),
        (("--dtype", "float16"), ["float16", "float32", "bfloat16"]),
        (("--no-such-flag",), ["--no-such-flag"]),
        (("stray",), ["stray"]),
        (("--prompt", "again"), ["--prompt"]),
        (("--prompt-ids", "1"), ["give the prompt once"]),
        (("--system-prompt", "be"), ["--system-prompt", "--chat"]),
        (("--enable-thinking",), ["--enable-thinking", "--chat"]),
        (("--chat-template-kwargs", "{}"), ["--chat-template-kwargs", "--chat"]),
        (("--chat", "--chat-template-kwargs", "{"), ["not JSON"]),
        (("--chat", "--chat-template-kwargs", "[1]"), ["JSON object", "[1]"]),
        (("--chat", "--chat-template-kwargs", '{"messages": 1}'), ["sets messages"]),
        (
            ("--chat", "--enable-thinking", "--chat-template-kwargs", '{"enable_thinking": true}'),
            ["sets enable_thinking"],
        ),
    ],
)
def test_flag_is_refused(run, tiny, arguments, words):
    refused(run("generate", tiny, *PROMPT, *arguments), USAGE, *words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), ["give the prompt once", "--prompt -"]),
        (("--prompt", ""), ["prompt 0 is empty"]),
        (("--prompt", "\udcff\udcfe"), ["not valid Unicode", "U+DCFF"]),
        (("--chat", "--prompt", "\udcff"), ["not valid Unicode", "U+DCFF"]),
        (("--prompt-ids", "1,x"), ["1,x", "whole numbers"]),
        (("--prompt-ids", ""), ["empty"]),
        (("--prompt-ids", "4096"), ["id 4096", "0 to 4095"]),
        (("--prompt-ids", "-1"), ["id -1", "0 to 4095"]),
        (("--prompt-ids", "1", "--chat"), ["--chat"]),
        (("--prompt", "Moses " * 200), ["context is 128"]),
    ],
)
def test_prompt_is_refused(run, tiny, arguments, words):
    refused(run("generate", tiny, *arguments), USAGE, *words)


def test_standard_input_that_is_not_utf8_is_refused(run, tiny):
    outcome = run("generate", tiny, "--prompt", "-", stdin=b"Moses \xff")
    refused(outcome, USAGE, "not UTF-8", "0xff at 6")


def test_empty_standard_input_is_refused(run, tiny):
    refused(run("generate", tiny, "--prompt", "-"), USAGE, "prompt 0 is empty")


@pytest.mark.parametrize("verb", ["generate", "chat", "inspect", "bench"])
def test_missing_model_is_refused(run, verb):
    refused(run(verb), USAGE, "--model", f"qwen-jax {verb} --help")


def test_unknown_verb_is_refused(run):
    refused(run("genrate", "demo"), USAGE, "genrate", "generate")


@pytest.mark.parametrize("verb", ["generate", "chat"])
def test_shape_without_weights_is_refused(run, verb):
    arguments = PROMPT if verb == "generate" else ()
    refused(run(verb, "qwen3.6-35b-a3b", *arguments), USAGE, "names a shape", "demo")


@pytest.mark.parametrize("verb", ["generate", "chat", "inspect", "bench"])
def test_missing_folder_is_a_failure(run, tmp_path, verb):
    arguments = PROMPT if verb == "generate" else ()
    outcome = run(verb, str(tmp_path / "nowhere"), *arguments)
    refused(outcome, FAILURE, "nowhere does not exist")


def test_name_of_nothing_is_refused(run):
    refused(run("inspect", "qwen9"), USAGE, "'qwen9'", "qwen3.6-35b-a3b")
    refused(run("bench", "qwen9", "--dummy"), USAGE, "'qwen9'")


def _truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _lose_weights(folder: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _widen(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 48}))


def _rename_type(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))


def _damage_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def _escape(folder: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "../model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _bad_sampling(folder: Path) -> None:
    config = {"do_sample": True, "temperature": -1.0}
    (folder / "generation_config.json").write_text(json.dumps(config))


def _quantise(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= {"quantization_config": {"quant_method": "gptq"}, "hidden_size": 2**20}
    (folder / "config.json").write_text(json.dumps(config))


def _bad_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        (_truncate, "model.safetensors"),
        (_lose_weights, "model-00001-of-00002.safetensors"),
        (_widen, "misshapen"),
        (_rename_type, "llama"),
        (_damage_config, "config.json"),
        (_escape, "../model.safetensors"),
        (_bad_sampling, "temperature is -1"),
        (_bad_tokenizer, "tokenizer.json"),
        (_quantise, "quantised weights (GPTQ)"),
    ],
)
def test_damaged_folder_is_a_failure(
    run, tiny, tmp_path, damage: Callable[[Path], None], word: str
):
    folder = tmp_path / "damaged"
    shutil.copytree(tiny, folder)
    damage(folder)
    refused(run("generate", str(folder), *PROMPT), FAILURE, word)


def test_text_for_a_folder_without_tokenizer_is_refused(run, write_tiny, tmp_path):
    folder = str(write_tiny(tmp_path / "ids", tokenizer=False))
    refused(run("generate", folder, *PROMPT), USAGE, "no tokenizer", "--prompt-ids")
    refused(run("chat", folder), USAGE, "no tokenizer", "--prompt-ids")


def test_template_that_raises_is_refused(run, tiny, tmp_path):
    folder = tmp_path / "raises"
    shutil.copytree(tiny, folder)
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no users here') }}")
    outcome = run("generate", str(folder), "--chat", *PROMPT)
    refused(outcome, USAGE, "chat template refuses", "no users here")


def test_model_that_cannot_fit_is_refused_before_loading(run, tiny, monkeypatch):
    import qwen_jax.memory

    monkeypatch.setattr(qwen_jax.memory, "available_memory", lambda: 400_000)
    outcome = run("generate", tiny, *PROMPT, "--max-tokens", "8")
    refused(outcome, FAILURE, "needs 0.00 GB", "0.00 GB are available")
    assert "loading" not in outcome.err


def test_device_out_of_memory_is_a_failure(run, monkeypatch):
    def out_of_memory(*_: object, **__: object) -> None:
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes\nand much more")

    monkeypatch.setattr("qwen_jax.cli.inspect.find_shape", out_of_memory)
    outcome = run("inspect", "demo")
    refused(outcome, FAILURE, "Out of memory allocating 9 bytes", "smaller batch")
    assert "much more" not in outcome.err
