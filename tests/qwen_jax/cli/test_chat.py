"""`qwen-jax chat`, its lines coming from a pipe."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from qwen_jax.generation import generate
from qwen_jax.loading import load

FLAGS = ("--max-tokens", "8", "--no-enable-thinking")


@pytest.fixture(scope="module")
def model(tmp_path_factory, write_tiny) -> str:
    """A folder whose template keeps the bare words, so that turns stay short."""
    folder: Path = write_tiny(tmp_path_factory.mktemp("chat") / "model")
    template = "{% for m in messages %}{{ m.role[0] }}: {{ m.content }}\n{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    return str(folder)


def replies(model: str, *turns: str, system: str | None = None) -> list[str]:
    """What a conversation must give, each turn generated anew from all before it."""
    loaded, tokenizer = load(model, dtype="float32")
    assert tokenizer is not None
    messages = [] if system is None else [{"role": "system", "content": system}]
    texts = []
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        prompt = tokenizer.apply_chat_template(messages)
        texts.append(generate(loaded, tokenizer, prompt, max_tokens=8).text)
        messages.append({"role": "assistant", "content": texts[-1].lstrip()})
    return texts


def test_each_turn_sees_the_earlier_ones(run, model):
    outcome = run("chat", model, *FLAGS, stdin=b"hi\n\nand then\n")
    assert outcome.code == 0
    assert outcome.out == "".join(f"{text}\n" for text in replies(model, "hi", "and then"))
    assert outcome.err.count("compiling ...") == 1
    assert "[cut at --max-tokens: " in outcome.err


def test_reset_forgets_all_but_the_system_prompt(run, model):
    lines = b"hi\n/reset\nhi\n/exit\nnever read\n"
    outcome = run("chat", model, *FLAGS, "--system-prompt", "be", "-q", stdin=lines)
    (text,) = replies(model, "hi", system="be")
    assert outcome == (0, f"{text}\n" * 2, "")


def test_full_context_is_an_error_that_keeps_the_session(run, model):
    lines = b"hi\n" + b"Moses " * 60 + b"\nand then\n"
    outcome = run("chat", model, *FLAGS, "--max-model-len", "48", stdin=lines)
    assert outcome.out == "".join(f"{text}\n" for text in replies(model, "hi", "and then"))
    (error,) = [line for line in outcome.err.splitlines() if line.startswith("error: ")]
    assert "the context holds 48" in error and "/reset" in error
    assert outcome.code == 1


def test_last_reply_is_cut_where_the_context_ends(run, model):
    outcome = run("chat", model, "--max-tokens", "100", "--max-model-len", "13", stdin=b"hi\n")
    assert outcome.code == 0
    counts = outcome.err.rpartition("[cut at --max-tokens: ")[2].partition(" tokens")[0]
    assert sum(int(count) for count in counts.split("+")) == 13


@pytest.mark.parametrize(
    ("line", "words"),
    [(b"/nonsense\n", "there is no command /nonsense"), (b"\xff\xfe\n", "not valid Unicode")],
)
def test_bad_line_is_an_error_that_keeps_the_session(run, model, line, words):
    outcome = run("chat", model, *FLAGS, stdin=line + b"hi\n")
    assert outcome.out == f"{replies(model, 'hi')[0]}\n"
    assert words in outcome.err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--max-tokens", "-1"), "--max-tokens is -1"),
        (("--temp", "-1"), "--temperature is -1"),
        (("--chat-template-kwargs", "{"), "not JSON"),
        (("--max-model-len", "3"), "context is 3"),
    ],
)
def test_bad_flag_is_refused_before_loading(run, model, flags, words):
    outcome = run("chat", model, *flags, stdin=b"hi\n")
    assert (outcome.code, outcome.out) == (2, "")
    assert words in outcome.err
    assert "loading" not in outcome.err


def test_interrupt_stops_the_reply_and_keeps_what_was_said(run, model, monkeypatch):
    module = importlib.import_module("qwen_jax.generation")
    stream = module.stream_generate
    prompts = []

    def interrupted(model, tokenizer, prompt, **options) -> Iterator:
        prompts.append(tokenizer.decode(prompt) if isinstance(prompt, list) else prompt)
        pieces = stream(model, tokenizer, prompt, **options)

        def first_two() -> Iterator:
            for _ in range(2):
                yield next(pieces)
            raise KeyboardInterrupt

        return first_two()

    monkeypatch.setattr(module, "stream_generate", interrupted)
    outcome = run("chat", model, *FLAGS, stdin=b"hi\nand then\n")
    assert outcome.code == 0
    assert outcome.err.count("[stopped: ") == 2
    monkeypatch.undo()
    loaded, tokenizer = load(model, dtype="float32")
    pieces = stream(loaded, tokenizer, "u: hi\n", max_tokens=8)
    said = "".join(next(pieces).text for _ in range(2))
    assert prompts[-1] == f"u: hi\na: {said.lstrip()}\nu: and then\n"
