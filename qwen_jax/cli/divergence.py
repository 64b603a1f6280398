"""`qwen-jax divergence`: how far one model's predictions are from another's."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from cyclopts import Parameter

from ..errors import MemoryLimitError, RequestError
from .console import Notes, accept_any_text, size, table, write_json
from .evaluation import (
    ActivationFlags,
    WindowFlags,
    announced,
    fitted_to,
    perplexity_as_json,
    perplexity_as_text,
    read_texts,
    refuse_long_window,
    scored,
    windows_as_json,
    windows_as_text,
)
from .loading import ModelFolder
from .options import DType, Kernels, Switch, Text

if TYPE_CHECKING:
    from ..evaluate import Divergence, Windows
    from ..evaluate.stored import Origin
    from ..model import CausalLM

_WINDOWS, _ACTIVATIONS = WindowFlags(), ActivationFlags()


def divergence(
    base: str,
    other: str,
    text: str,
    /,
    *texts: str,
    revision: Text = None,
    other_revision: Text = None,
    base_logprobs: Path | None = None,
    windows: WindowFlags = _WINDOWS,
    activations: ActivationFlags = _ACTIVATIONS,
    dtype: DType | None = None,
    implementation: Kernels | None = None,
    json: Switch = False,
    quiet: Annotated[bool, Parameter(negative="", alias="-q")] = False,
) -> None:
    """Say how far a model's predictions are from a base's: KL divergence and agreement.

    Args:
        base: the model to compare with: a model folder, demo, or the id of a model on the Hub.
        other: the model to judge, with the same tokenizer and vocabulary.
        text: a text file, or token ids as .npy or .jsonl.
        texts: further ones; windows do not reach from one into the next.
        revision: branch, tag or commit of a base on the Hub; the main branch by default.
        other_revision: the same of the other.
        base_logprobs: keep the base's log-probabilities in this file: written where it is not
            there, read where it is, if it fits. So the base runs once for many others, and never
            lies in memory beside them.
        windows: how the text is cut.
        activations: inputs of matrices of the other in few bits.
        dtype: of weights and activations; each model's own by default, float32 on a CPU.
        implementation: run every operation so, or fail: reference (plain JAX) or triton (GPU
            kernels); by default each call runs on the first that takes it.
        json: write one JSON object.
        quiet: write nothing to standard error but errors and warnings.
    """
    notes, names = Notes(quiet=quiet), (text, *texts)
    accept_any_text()
    activations.check(names)
    first = ModelFolder.open(base, dtype, notes, revision, implementation)
    second = ModelFolder.open(other, dtype, notes, other_revision, implementation)
    for folder in (first, second):
        refuse_long_window(folder, windows.window)
    cut = windows.windows(read_texts(names, first, windows.window))
    _refuse_other_vocabulary(first, second, names)
    models = [
        {
            "model": folder.name,
            "dtype": folder.config.dtype,
            "calibrated_on": fitted_to(folder, names),
        }
        for folder in (first, second)
    ]
    result = _Comparison(first, second, cut, windows, activations, notes).run(base_logprobs)
    if json:
        write_json(
            {
                "base": models[0],
                "other": models[1],
                "activations": activations.as_json(),
                **windows_as_json(cut, names),
                **_as_json(result),
            }
        )
        return
    print(_as_text(result, cut))


@dataclasses.dataclass(frozen=True)
class _Comparison:
    """Two models and the windows to run them over."""

    base: ModelFolder
    other: ModelFolder
    windows: Windows
    flags: WindowFlags
    activations: ActivationFlags
    notes: Notes

    def run(self, file: Path | None) -> Divergence:
        from ..evaluate import divergence, score
        from ..evaluate.stored import read

        size_of_batch = self.flags.batch_size
        if file is None:
            loaded = self.base.load(self.notes)
            base = score(loaded, self.windows, batch_size=size_of_batch)
        else:
            origin = self._origin()
            if not file.exists():
                self._store(file, origin)
            vocabulary = self.base.config.vocab_size
            base = read(file, origin, self.windows, vocabulary, size_of_batch)
        loaded = self.activations.apply(self._load_other(file), self.other, self.flags)
        other = score(loaded, self.windows, batch_size=size_of_batch)
        other = announced(other, self.windows.scored, self.notes, "comparing", scored)
        return divergence(base, other)

    def _load_other(self, file: Path | None) -> CausalLM:
        try:
            return self.other.load(self.notes)
        except MemoryLimitError as error:
            if file is not None:
                raise
            raise MemoryLimitError(
                f"{error}. The base lies in memory too: with --base-logprobs FILE it runs first, "
                "and is gone before the other is loaded"
            ) from error

    def _origin(self) -> Origin:
        from ..evaluate.stored import Origin

        config = self.base.config
        return Origin.of(
            self.base.path, config.dtype, self.windows, self.base.tokenizer, config.vocab_size
        )

    def _store(self, file: Path, origin: Origin) -> None:
        from ..evaluate import score
        from ..evaluate.stored import refuse_unless_room, store, stored_bytes

        vocabulary = self.base.config.vocab_size
        refuse_unless_room(file, self.windows, vocabulary)
        needed = size(stored_bytes(self.windows, vocabulary))
        self.notes(f"{file}: storing the base's log-probabilities, {needed}")
        loaded = self.base.load(self.notes)
        scores = score(loaded, self.windows, batch_size=self.flags.batch_size)
        scores = announced(scores, self.windows.scored, self.notes, self.base.name, scored)
        store(file, scores, origin, self.windows, vocabulary)


def _refuse_other_vocabulary(base: ModelFolder, other: ModelFolder, texts: Sequence[str]) -> None:
    """Raise `RequestError` unless an id means the same to both models."""
    sizes = base.config.vocab_size, other.config.vocab_size
    if sizes[0] != sizes[1]:
        raise RequestError(
            f"{base.name} has a vocabulary of {sizes[0]}, {other.name} one of {sizes[1]}; a "
            "divergence needs the same, so give a model made from the base"
        )
    if base.tokenizer is None or other.tokenizer is None:
        return
    known = [
        folder.tokenizer.backend.get_vocab(with_added_tokens=True)
        for folder in (base, other)
        if folder.tokenizer is not None
    ]
    if known[0] != known[1]:
        differing = dict(known[0].items() ^ known[1].items())
        raise RequestError(
            f"the tokenizers of {base.name} and {other.name} differ in {len(differing)} entries, "
            f"such as {min(differing)!r}; an id must mean the same to both, so give a model made "
            "from the base"
        )
    for text in texts:
        ours, theirs = (read_texts([text], folder, 1) for folder in (base, other))
        if any(not np.array_equal(a.tokens, b.tokens) for a, b in zip(ours, theirs, strict=True)):
            raise RequestError(
                f"the tokenizers of {base.name} and {other.name} give different tokens for {text}; "
                "give a model made from the base"
            )


def _as_json(result: Divergence) -> dict[str, Any]:
    values = dataclasses.asdict(result)
    for name in ("tokens", "base", "other"):
        del values[name]
    return values | {
        "base_perplexity": perplexity_as_json(result.base),
        "other_perplexity": perplexity_as_json(result.other),
        "perplexity_ratio": result.perplexity_ratio,
    }


def _as_text(result: Divergence, windows: Windows) -> str:
    return table(
        {
            "text": windows_as_text(windows),
            "KL(base || other)": f"mean {result.mean_kl:.6f} +- {result.standard_error:.6f} nats, "
            f"median {result.median_kl:.6f}, 99 % {result.p99_kl:.6f}, largest {result.max_kl:.6f}",
            "same top token": f"{result.top1_agreement:.3%}",
            "base perplexity": perplexity_as_text(result.base),
            "other perplexity": perplexity_as_text(result.other),
            "perplexity ratio": f"{result.perplexity_ratio:.6f}",
        }
    )
