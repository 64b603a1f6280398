"""What `perplexity` and `divergence` share: their flags, and text to windows."""

from __future__ import annotations

import dataclasses
import hashlib
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from cyclopts import Parameter

from ..checkpoint.json_file import read_object
from ..errors import CheckpointError, RequestError
from .console import Notes, duration
from .flags import about, flags_of
from .loading import ModelFolder
from .options import MaybeWhole, Whole

if TYPE_CHECKING:
    from ..evaluate import Document, Perplexity, Scores, Windows
    from ..model import CausalLM


@Parameter(name="*")
@dataclasses.dataclass(frozen=True, kw_only=True)
class WindowFlags:
    """How the text is cut.

    Attributes:
        window: tokens of a window (512 by default).
        stride: tokens from one window to the next; by default the window, so that each stands
            alone and its first token is not scored. With less, only tokens that no earlier window
            has scored are scored, the others being context.
        batch_size: windows in one forward pass (4 by default); memory grows with it.
        max_windows: take this many of the first windows; all by default.
    """

    window: Whole = 512
    stride: MaybeWhole = None
    batch_size: Whole = 4
    max_windows: MaybeWhole = None

    def windows(self, documents: Sequence[Document]) -> Windows:
        """The documents in windows.

        Raises:
            RequestError: a number outside its range, or documents shorter than a window.
        """
        from ..evaluate import Windows

        if self.batch_size < 1:
            raise RequestError(
                f"--batch-size is {self.batch_size}; accepted is a whole number from 1 on"
            )
        with flags_of("window", "stride", "max_windows"):
            return Windows(
                documents, window=self.window, stride=self.stride, max_windows=self.max_windows
            )


@Parameter(name="*")
@dataclasses.dataclass(frozen=True, kw_only=True)
class ActivationFlags:
    """A research option: inputs of matrices in few bits, as numbers only and without any speed.

    Attributes:
        activation_bits: round the inputs of all linears and experts to so many bits, 3 to 8.
        activation_calibration: take one scale a channel from this text, cut like the evaluated one;
            by default one scale a token is taken from the token. May be repeated.
    """

    activation_bits: MaybeWhole = None
    activation_calibration: Annotated[tuple[str, ...], Parameter(negative="")] = ()

    def check(self, texts: Sequence[str]) -> None:
        """Raise `RequestError` for flags that contradict one another or the evaluated texts."""
        if self.activation_bits is None:
            if self.activation_calibration:
                raise RequestError(
                    "--activation-calibration is read with --activation-bits alone; add it, or "
                    "leave this out"
                )
            return
        from ..quant import ActivationFormat

        with about("--activation-bits"):
            ActivationFormat(self.activation_bits, self.kind)
        evaluated = {Path(text).resolve() for text in texts}
        same = [name for name in self.activation_calibration if Path(name).resolve() in evaluated]
        if same:
            raise RequestError(
                f"{same[0]} is evaluated and calibrated on, which says nothing of other text; give "
                "another --activation-calibration"
            )

    @property
    def kind(self) -> Any:
        """The kind of `ActivationFormat`."""
        return "static" if self.activation_calibration else "dynamic"

    def apply(self, model: CausalLM, folder: ModelFolder, flags: WindowFlags) -> CausalLM:
        """The model with its inputs rounded, or as it is if no bits were given."""
        if self.activation_bits is None:
            return model
        from ..evaluate import Windows
        from ..evaluate.activation_scales import activation_scales
        from ..evaluate.activations import with_activations
        from ..quant import ActivationFormat

        format, scales = ActivationFormat(self.activation_bits, self.kind), None
        if self.activation_calibration:
            documents = read_texts(self.activation_calibration, folder, flags.window)
            windows = Windows(documents, window=flags.window, max_windows=flags.max_windows)
            scales = activation_scales(model, windows, format, batch_size=flags.batch_size)
        return with_activations(model, format, scales)

    def as_json(self) -> dict[str, Any] | None:
        """What was asked for; None if nothing was."""
        if self.activation_bits is None:
            return None
        calibration = list(self.activation_calibration)
        return {"bits": self.activation_bits, "kind": self.kind, "calibration": calibration}


def read_texts(paths: Sequence[str], folder: ModelFolder, window: int) -> tuple[Document, ...]:
    """The documents of all files.

    Raises:
        RequestError: a file that cannot be read, or none of whose documents fills a window.
    """
    from ..evaluate import read_documents

    documents: list[Document] = []
    for path in paths:
        found = read_documents(path, folder.tokenizer, folder.config.vocab_size)
        longest = max((len(document.tokens) for document in found), default=0)
        if longest < window:
            raise RequestError(
                f"{path} has no document of {window} tokens (the longest has {longest}); give "
                "a longer text or a smaller --window"
            )
        documents += found
    return tuple(documents)


def refuse_long_window(folder: ModelFolder, window: int) -> None:
    """Raise `RequestError` if windows are longer than the model's context."""
    limit = folder.config.max_position_embeddings
    if window > limit:
        raise RequestError(
            f"--window is {window}, but the context of {folder.name} is {limit} tokens; give a "
            "smaller one"
        )


def fitted_to(folder: ModelFolder, texts: Sequence[str]) -> list[str]:
    """The texts, if any, that the codes of a folder were fitted to; warns of them.

    Raises:
        CheckpointError: the report beside the codes is damaged.
    """
    from convert.side_files import REPORT

    report = folder.path / REPORT
    if not report.is_file():
        return []
    try:
        known = _calibration_digests(read_object(report))
    except (AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{report} is damaged; fetch it again with the rest of the folder, or delete it"
        ) from error
    found = []
    for text in texts:
        with open(text, "rb") as stream:
            if hashlib.file_digest(stream, "sha256").hexdigest() in known:
                found.append(text)
    if found:
        warnings.warn(
            f"the codes of {folder.name} were fitted to {', '.join(found)}, so these figures say "
            "little of other text; evaluate on a text of its own",
            stacklevel=2,
        )
    return found


def _calibration_digests(report: Mapping[str, Any]) -> set[str]:
    """SHA-256 of all files that codes were fitted to, layer by layer or together."""
    runs = [report, *report.get("distillation", ())]
    texts = [run["calibration"] for run in runs if run.get("calibration") is not None]
    return {file["sha256"] for text in texts for file in text["files"]}


Part = TypeVar("Part")


def announced(
    parts: Iterator[Part], total: int, notes: Notes, what: str, tokens: Callable[[Part], int]
) -> Iterator[Part]:
    """The same parts, with a remark now and then on how far they are.

    Args:
        parts: of the work.
        total: tokens of all of them.
        notes: told the remarks.
        what: is worked on.
        tokens: of a part.
    """
    begin = last = time.monotonic()
    done = 0
    for part in parts:
        yield part
        done += tokens(part)
        now = time.monotonic()
        if now > last + 10:
            last = now
            left = (now - begin) * (total / done - 1)
            notes(f"{what}: {done:,} of {total:,} tokens, {duration(left)} to go")


def scored(part: Scores) -> int:
    """Tokens of a part that `score` yields, for `announced`."""
    return len(part.targets)


def windows_as_json(windows: Windows, texts: Sequence[str]) -> dict[str, Any]:
    """What was evaluated, ready for JSON."""
    return {
        "texts": list(texts),
        "window": windows.window,
        "stride": windows.stride,
        "windows": len(windows),
        "tokens": windows.tokens,
        "scored_tokens": windows.scored,
        "share_of_tokens": windows.scored / windows.tokens,
    }


def windows_as_text(windows: Windows) -> str:
    """What was evaluated, for a reader."""
    share = windows.scored / windows.tokens
    return (
        f"{len(windows):,} windows of {windows.window} tokens, stride {windows.stride}; "
        f"{windows.scored:,} of {windows.tokens:,} tokens scored ({share:.1%})"
    )


def perplexity_as_json(result: Perplexity) -> dict[str, float]:
    """A perplexity, ready for JSON."""
    return {
        "perplexity": result.perplexity,
        "mean_nll": result.mean_nll,
        "standard_error": result.standard_error,
    }


def perplexity_as_text(result: Perplexity) -> str:
    """A perplexity for a reader."""
    error = result.perplexity * result.standard_error
    return f"{result.perplexity:.4f} +- {error:.4f} ({result.mean_nll:.5f} nats a token)"
