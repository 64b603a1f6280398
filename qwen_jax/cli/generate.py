"""`qwen-jax generate`: complete a prompt."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from ..errors import RequestError
from .console import Notes, accept_any_text, write_json, write_text
from .loading import ModelFolder
from .options import DType, Kernels, LimitFlags, SamplingFlags, Switch, TemplateFlags, Text

if TYPE_CHECKING:
    from ..transcript import GenerationResult

_SAMPLING, _LIMITS, _TEMPLATE = SamplingFlags(), LimitFlags(), TemplateFlags()


def generate(
    model: str,
    *,
    revision: Text = None,
    prompt: Text = None,
    prompt_ids: Text = None,
    chat: Switch = False,
    template: TemplateFlags = _TEMPLATE,
    limits: LimitFlags = _LIMITS,
    sampling: SamplingFlags = _SAMPLING,
    dtype: DType | None = None,
    implementation: Kernels | None = None,
    logprobs: Switch = False,
    json: Switch = False,
    quiet: Annotated[bool, Parameter(negative="", alias="-q")] = False,
) -> None:
    """Complete a prompt, or answer it with --chat.

    The text goes to standard output as it becomes certain, all else to standard error.

    Args:
        model: a model folder, demo, or the id of a model on the Hub (organisation/name).
        revision: branch, tag or commit of a Hub model; the main branch by default.
        prompt: the text to complete, used as it is; - reads it from standard input.
        prompt_ids: the prompt as token ids, separated by commas or spaces.
        chat: make the prompt a user's message in the model's chat template.
        template: for --chat.
        limits: how long, and in how much memory.
        sampling: how to choose tokens.
        dtype: of weights and activations; the model's own by default, float32 on a CPU.
        implementation: run every operation so, or fail: reference (plain JAX) or triton (GPU
            kernels); by default each call runs on the first that takes it.
        logprobs: report the log-probability of each new token (within --json, else on standard
            error).
        json: write one JSON object instead of the text.
        quiet: write nothing to standard error but errors, warnings and asked-for logprobs.
    """
    notes = Notes(quiet=quiet)
    accept_any_text()
    if not chat:
        template.refuse_without_chat()
    folder = ModelFolder.open(model, dtype, notes, revision, implementation)
    request = _Request(
        folder,
        _prompt(folder, prompt, prompt_ids, template if chat else None),
        {
            "max_tokens": limits.max_tokens,
            "sampling": folder.sampling(sampling, notes),
            **limits.arguments(),
        },
    )
    result, compiled = request.run(notes, show=not json)
    if json:
        write_json(_as_json(folder, result, compiled, logprobs=logprobs))
        return
    if logprobs:
        _show_logprobs(folder, result)
    notes(stats(result))


@dataclasses.dataclass(frozen=True)
class _Request:
    """What to generate: checked, but not begun."""

    folder: ModelFolder
    prompt: str | list[int]
    arguments: dict[str, Any]

    def run(self, notes: Notes, *, show: bool) -> tuple[GenerationResult, float]:
        """The whole result, and the seconds that compilation took; the text is shown on the way."""
        from ..generation import stream_generate
        from ..transcript import join

        self._refuse_early()
        model = self.folder.load(notes)
        pieces = stream_generate(model, self.folder.tokenizer, self.prompt, **self.arguments)
        announced = AnnouncedCompilation(pieces, notes)
        received, text = [], ""
        for piece in announced:
            received.append(piece)
            if show:
                text += self._shown(piece)
                write_text(self._shown(piece))
        if text and not text.endswith("\n"):
            write_text("\n")
        return join(received), announced.seconds

    def _refuse_early(self) -> None:
        """Raise what `stream_generate` would, on shapes alone, and refuse what cannot fit."""
        from ..generation import DEFAULT_MAX_TOKENS, stream_generate
        from ..model import CausalLM

        shapes = CausalLM(self.folder.config)
        with LimitFlags.named():
            stream_generate(shapes, self.folder.tokenizer, self.prompt, **self.arguments)
        new = self.arguments["max_tokens"]
        new = DEFAULT_MAX_TOKENS if new is None else new
        tokens = max(1, self._prompt_length() + new)
        self.folder.refuse_early(tokens, self.arguments["kv_cache_dtype"])

    def _prompt_length(self) -> int:
        if isinstance(self.prompt, list) or self.folder.tokenizer is None:
            return len(self.prompt)
        return len(self.folder.tokenizer.encode(self.prompt))

    def _shown(self, piece: GenerationResult) -> str:
        if self.folder.tokenizer is None:
            return "".join(f"{token} " for token in piece.tokens)
        return piece.text


class AnnouncedCompilation:
    """A stream of pieces whose compilation is announced: a silent first step looks like a hang.

    Pieces are held back until the second has come, for which the last program was compiled: so no
    remark gets between pieces of text on a terminal.

    Attributes:
        seconds: how long tracing and compiling took, once it is over.
    """

    def __init__(self, pieces: Iterator[GenerationResult], notes: Notes) -> None:
        self._pieces = pieces
        self._notes = notes
        self.seconds = 0.0

    def __iter__(self) -> Iterator[GenerationResult]:
        from ..compile_time import compile_seconds

        before = compile_seconds()
        self._notes("compiling ...")
        held = []
        for piece in self._pieces:
            held.append(piece)
            if len(held) == 2 or piece.finish_reason is not None:
                break
        self.seconds = compile_seconds() - before
        self._notes(f"compiled in {self.seconds:.1f} s")
        yield from held
        yield from self._pieces


def stats(result: GenerationResult) -> str:
    """The figures that mlx-lm shows after a generation, in its shape."""
    from ..memory import peak_memory

    return "\n".join(
        (
            "=" * 10,
            f"Prompt: {result.prompt_tokens} tokens, {result.prompt_tps:.3f} tokens-per-sec",
            f"Generation: {result.generation_tokens} tokens, "
            f"{result.generation_tps:.3f} tokens-per-sec",
            f"Peak memory: {peak_memory() / 1e9:.3f} GB",
        )
    )


def _prompt(
    folder: ModelFolder, text: str | None, ids: str | None, template: TemplateFlags | None
) -> str | list[int]:
    """The prompt as `stream_generate` takes it."""
    if (text is None) == (ids is None):
        raise RequestError(
            "give the prompt once: --prompt TEXT, --prompt - for standard input, or "
            "--prompt-ids IDS"
        )
    if ids is not None:
        if template is not None:
            raise RequestError(
                "--prompt-ids are used as they are; leave out --chat, or give --prompt"
            )
        return _ids(ids)
    text = _standard_input() if text == "-" else str(text)
    if folder.tokenizer is None:
        raise RequestError(
            f"{folder.path} has no tokenizer; give the prompt as token ids with --prompt-ids"
        )
    if template is None:
        return text
    messages = [*template.messages(), {"role": "user", "content": text}]
    return folder.tokenizer.apply_chat_template(messages, **template.variables())


def _ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise RequestError(
            f"--prompt-ids is {text[:80]!r}; accepted are whole numbers, such as 5,17,3"
        ) from None


def _standard_input() -> str:
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"standard input is not UTF-8: byte 0x{error.object[error.start]:02x} at "
            f"{error.start}; give text in UTF-8"
        ) from None


def _show_logprobs(folder: ModelFolder, result: GenerationResult) -> None:
    for token, value in zip(result.tokens, result.logprobs, strict=True):
        text = "" if folder.tokenizer is None else repr(folder.tokenizer.decode([token]))
        print(f"{token:>8} {value:10.4f}  {text}", file=sys.stderr)


def _as_json(
    folder: ModelFolder, result: GenerationResult, compiled: float, *, logprobs: bool
) -> dict[str, Any]:
    import jax

    from ..memory import peak_memory

    values = dataclasses.asdict(result)
    del values["index"]
    if not logprobs:
        del values["logprobs"]
    return {
        "model": folder.name,
        **values,
        "dtype": folder.config.dtype,
        "device": jax.devices()[0].device_kind,
        "compile_seconds": compiled,
        "peak_memory_bytes": peak_memory(),
    }
