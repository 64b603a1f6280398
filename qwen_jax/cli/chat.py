"""`qwen-jax chat`: a conversation, a line a turn."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from ..errors import CacheFullError, MemoryLimitError, RequestError
from .console import Notes, accept_any_text, dim, write_text
from .generate import AnnouncedCompilation
from .loading import ModelFolder
from .options import DType, Kernels, LimitFlags, SamplingFlags, TemplateFlags, Text
from .thinking import Part, ThinkParser

if TYPE_CHECKING:
    from ..decode import SamplingOptions
    from ..model import CausalLM
    from ..transcript import GenerationResult

DEFAULT_MAX_TOKENS = 1024
COMMANDS = "/reset forgets the conversation, /exit or Ctrl-D ends it, Ctrl-C stops a reply"

_SAMPLING, _LIMITS, _TEMPLATE = SamplingFlags(), LimitFlags(), TemplateFlags()


def chat(
    model: str,
    *,
    revision: Text = None,
    template: TemplateFlags = _TEMPLATE,
    limits: LimitFlags = _LIMITS,
    sampling: SamplingFlags = _SAMPLING,
    dtype: DType | None = None,
    implementation: Kernels | None = None,
    quiet: Annotated[bool, Parameter(negative="", alias="-q")] = False,
) -> int:
    """Talk with a model: each line of standard input is a turn.

    /reset forgets the conversation, /exit or Ctrl-D ends it, Ctrl-C stops a reply. A reply has at
    most 1024 tokens by default.

    Args:
        model: a model folder, demo, or the id of a model on the Hub (organisation/name).
        revision: branch, tag or commit of a Hub model; the main branch by default.
        template: what the chat template is given.
        limits: how long a reply is, and in how much memory.
        sampling: how to choose tokens.
        dtype: of weights and activations; the model's own by default, float32 on a CPU.
        implementation: run every operation so, or fail: reference (plain JAX) or triton (GPU
            kernels); by default each call runs on the first that takes it.
        quiet: write nothing to standard error but errors and warnings.
    """
    notes = Notes(quiet=quiet)
    accept_any_text()
    folder = ModelFolder.open(model, dtype, notes, revision, implementation)
    options = folder.sampling(sampling, notes)
    conversation = Conversation(folder, template, limits, options, notes)
    conversation.refuse_early()
    conversation.model = folder.load(notes)
    notes(COMMANDS)
    return Terminal(conversation, notes).run()


@dataclasses.dataclass
class Conversation:
    """The turns so far, and what answers the next one.

    Attributes:
        folder: the model's folder.
        template: what the chat template is given.
        limits: how long a reply may be, and in how much memory.
        sampling: how to choose tokens.
        notes: told of compilation and rates.
        model: None until the weights are read.
        messages: the turns so far, the system message included.
    """

    folder: ModelFolder
    template: TemplateFlags
    limits: LimitFlags
    sampling: SamplingOptions
    notes: Notes
    model: CausalLM | None = None
    messages: list[dict[str, Any]] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self._announce = True
        self.reset()

    def reset(self) -> None:
        """Forget all turns but the system message."""
        self.messages = [*self.template.messages()]

    def prompt(self, text: str) -> str:
        """The prompt for a user's next message.

        Raises:
            RequestError: no tokenizer or chat template, or the template refuses the messages.
        """
        if self.folder.tokenizer is None:
            raise RequestError(
                f"{self.folder.path} has no tokenizer; chat needs one. Use generate --prompt-ids"
            )
        turns = [*self.messages, {"role": "user", "content": text}]
        return self.folder.tokenizer.apply_chat_template(turns, **self.template.variables())

    def refuse_early(self) -> None:
        """Raise what a short first turn would, before the weights are read."""
        from ..generation import stream_generate
        from ..model import CausalLM

        most = 1 if self.limits.max_tokens is None else min(self.limits.max_tokens, 1)
        shapes, prompt = CausalLM(self.folder.config), self.prompt("Hello")
        with LimitFlags.named():
            stream_generate(shapes, self.folder.tokenizer, prompt, **self._arguments(most))
        self.folder.refuse_early(1, self.limits.cache_dtype)

    def _arguments(self, max_tokens: int | None) -> dict[str, Any]:
        return {"max_tokens": max_tokens, "sampling": self.sampling, **self.limits.arguments()}

    def reply(self, text: str) -> None:
        """Answer a message and remember both; a message that cannot be answered is forgotten.

        Raises:
            RequestError: the conversation does not fit in the context any more, or the template
                refuses the message.
            MemoryLimitError: the device has no room for the cache.
        """
        from ..generation import stream_generate

        assert self.model is not None and self.folder.tokenizer is not None
        prompt = self.prompt(text)
        ids = self.folder.tokenizer.encode(prompt)
        arguments = self._arguments(self._room(len(ids)))
        with LimitFlags.named():
            pieces = stream_generate(self.model, self.folder.tokenizer, ids, **arguments)
        parser = ThinkParser(prompt)
        last, stopped = self._show(self._announced(pieces), parser)
        answer = {
            "role": "assistant",
            "content": parser.answer,
            "reasoning_content": parser.thought,
        }
        self.messages += [{"role": "user", "content": text}, answer]
        self._report(last, stopped)

    def _announced(self, pieces: Iterator[GenerationResult]) -> Iterator[GenerationResult]:
        """The pieces, with a word on compilation in the first turn; later ones need little."""
        if self._announce:
            self._announce = False
            return iter(AnnouncedCompilation(pieces, self.notes))
        return pieces

    def _show(
        self, pieces: Iterator[GenerationResult], parser: ThinkParser
    ) -> tuple[GenerationResult | None, bool]:
        """Write the reply; returns its last piece, and whether the user stopped it."""
        last, stopped = None, False
        try:
            for last in pieces:
                _write(parser.feed(last.text))
        except KeyboardInterrupt:
            stopped = True
        _write(parser.finish())
        write_text("\n")
        return last, stopped

    def _room(self, prompt_tokens: int) -> int:
        """Most tokens of the reply."""
        from ..accounting import cache_bytes
        from ..memory import refuse_unless_fits

        config, limit = self.folder.config, self.limits.max_model_len
        context = config.max_position_embeddings if limit is None else limit
        if prompt_tokens >= context:
            raise RequestError(
                f"the conversation has {prompt_tokens} tokens with this message, and the context "
                f"holds {context}; the message was dropped. Shorten it, or /reset"
            )
        asked = DEFAULT_MAX_TOKENS if self.limits.max_tokens is None else self.limits.max_tokens
        most = min(asked, context - prompt_tokens)
        tokens = prompt_tokens + max(most, 1)
        needed = cache_bytes(config, 1, tokens, self.limits.cache_dtype)
        refuse_unless_fits(needed, f"a cache of {tokens} tokens")
        return most

    def _report(self, last: GenerationResult | None, stopped: bool) -> None:
        if last is None:
            return
        why = (
            "stopped"
            if stopped
            else "cut at --max-tokens"
            if last.finish_reason == "length"
            else "done"
        )
        self.notes(
            f"[{why}: {last.prompt_tokens} + {last.generation_tokens} tokens, "
            f"{last.generation_tps:.1f} tokens-per-sec]"
        )


class Terminal:
    """Lines in, replies out. Errors of one turn end that turn only."""

    def __init__(self, conversation: Conversation, notes: Notes) -> None:
        self._conversation = conversation
        self._notes = notes
        self._failed = False
        self._interactive = sys.stdin.isatty()
        with contextlib.suppress(AttributeError):
            # What is not UTF-8 is refused where the message is encoded, and the session goes on.
            sys.stdin.reconfigure(errors="surrogateescape")  # type: ignore[union-attr]
        if self._interactive:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401 - gives input() a history and line editing

    def run(self) -> int:
        """Talk until the end; 1 if standard input is no terminal and a turn failed, else 0."""
        while (line := self._read()) is not None:
            text = line.strip()
            if text == "/exit":
                break
            if text:
                self._take(text)
        return 1 if self._failed and not self._interactive else 0

    def _take(self, text: str) -> None:
        if text == "/reset":
            self._conversation.reset()
            self._notes("the conversation is forgotten")
        elif re.fullmatch(r"/\w+", text):
            self._fail(f"there is no command {text}; {COMMANDS}")
        else:
            try:
                self._conversation.reply(text)
            except (RequestError, MemoryLimitError, CacheFullError) as error:
                self._fail(str(error))

    def _fail(self, message: str) -> None:
        self._failed = True
        print(f"error: {message}", file=sys.stderr, flush=True)

    def _read(self) -> str | None:
        """The next line, None at the end."""
        if not self._interactive:
            return sys.stdin.readline() or None
        while True:
            try:
                return input(">>> ")
            except EOFError:
                write_text("\n")
                return None
            except KeyboardInterrupt:
                print("\n/exit or Ctrl-D ends the chat", file=sys.stderr)


def _write(parts: list[Part]) -> None:
    for kind, text in parts:
        write_text(text if kind == "answer" else dim(text))
