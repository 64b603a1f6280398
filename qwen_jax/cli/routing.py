"""`qwen-jax routing`: which experts a text uses, as a report with pictures."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from ..errors import RequestError
from .console import Notes, accept_any_text, size, table, write_json
from .evaluation import announced, read_texts, refuse_long_window
from .loading import ModelFolder
from .new_folder import new_folder, refuse_taken
from .options import DType, Kernels, MaybeWhole, Switch, Text, Whole

if TYPE_CHECKING:
    from ..evaluate import Document
    from ..model import RoutingTrace
    from ..research import Piece, RoutingCounts, Summary


def routing(
    model: str,
    *,
    text: Annotated[tuple[str, ...], Parameter(negative="")],
    out: Path,
    revision: Text = None,
    window: Whole = 512,
    max_tokens: Whole = 16384,
    batch_size: Whole = 4,
    prefill_chunk_size: MaybeWhole = None,
    trace: Switch = False,
    dtype: DType | None = None,
    implementation: Kernels | None = None,
    json: Switch = False,
    quiet: Annotated[bool, Parameter(negative="", alias="-q")] = False,
) -> None:
    """Say which experts a text uses: load, balance, co-activation, transitions, what experts take.

    Writes a folder with report.html, which holds its pictures, the pictures as files, and all
    figures as routing.json. Needs the extra "research" (matplotlib).

    Args:
        model: a model folder, demo, or the id of a model on the Hub (organisation/name).
        text: a text file, or token ids as .npy or .jsonl; may be repeated.
        out: the folder to write; it must not exist, or be empty.
        revision: branch, tag or commit of a Hub model; the main branch by default.
        window: most tokens that are read together (512 by default); each window begins anew.
        max_tokens: read no more than this (16384 by default); all of them are held, at 8 bytes a
            layer and chosen expert.
        batch_size: windows in one forward pass (4 by default); memory grows with it.
        prefill_chunk_size: most tokens of a window in one forward pass (by default 512, and on a
            GPU up to 8192, as its memory allows).
        trace: write the experts and weights of every token too, as trace.safetensors.
        dtype: of weights and activations; the model's own by default, float32 on a CPU.
        implementation: run every operation so, or fail: reference (plain JAX) or triton (GPU
            kernels); by default each call runs on the first that takes it.
        json: write one JSON object.
        quiet: write nothing to standard error but errors and warnings.
    """
    from ..model.intervention import sparse_layers
    from ..research.capture import trace_text
    from ..research.figures import require_matplotlib

    notes = Notes(quiet=quiet)
    accept_any_text()
    require_matplotlib()
    refuse_taken(out, "--out")
    limits = {
        "--window": window,
        "--max-tokens": max_tokens,
        "--batch-size": batch_size,
        "--prefill-chunk-size": prefill_chunk_size,
    }
    _refuse_below_one(limits)
    folder = ModelFolder.open(model, dtype, notes, revision, implementation)
    layers = sparse_layers(folder.config)
    refuse_long_window(folder, window)
    documents = read_texts(text, folder, 1)
    sequences = cut(documents, window, max_tokens)
    folder.refuse_early(batch_size * max(map(len, sequences)))
    tokens = sum(map(len, sequences))
    held = 8 * len(layers) * tokens * folder.config.num_experts_per_tok
    notes(f"{tokens:,} tokens in {len(sequences)} windows; their routing takes {size(held)}")
    pieces = trace_text(
        folder.load(notes),
        sequences,
        probabilities=True,
        batch_size=batch_size,
        chunk_size=prefill_chunk_size,
    )
    run = _Run(folder, text, documents, sequences, window)
    traced, counts = _collected(pieces, tokens, notes, model)
    summary = run.write(out, traced, counts, with_trace=trace)
    if json:
        write_json({"model": model, "out": str(out), **summary.as_json()})
        return
    print(_as_text(summary, out))


@dataclasses.dataclass(frozen=True)
class _Run:
    """What was read, by which model."""

    folder: ModelFolder
    texts: Sequence[str]
    documents: Sequence[Document]
    sequences: Sequence[Any]
    window: int

    def write(
        self, out: Path, trace: RoutingTrace, counts: RoutingCounts, *, with_trace: bool
    ) -> Summary:
        """Write the report, and give its figures."""
        from ..research.report import Report
        from ..research.trace import save_trace

        result = Report.of(trace, counts, self.facts(), self.folder.tokenizer)
        with new_folder(out) as work:
            result.write(work)
            if with_trace:
                save_trace(work / "trace.safetensors", trace, model=self.folder.name)
        return result.summary

    def facts(self) -> dict[str, str]:
        """What the head of the report says."""
        from .provenance import commit, device, versions

        config, found = self.folder.config, device()
        read, there = sum(map(len, self.sequences)), sum(len(d.tokens) for d in self.documents)
        share = "" if read == there else f" of {there:,}"
        used = ", ".join(f"{name} {version}" for name, version in versions().items())
        return {
            "model": self.folder.name,
            "kind": f"{config.model_type}, {config.num_hidden_layers} layers, "
            f"{config.num_experts} experts, {config.num_experts_per_tok} a token",
            "text": ", ".join(self.texts),
            "tokens": f"{read:,}{share}, in {len(self.sequences)} windows of at most {self.window}",
            "run in": f"{config.dtype} on {found['count']} x {found['kind']}",
            "versions": used,
            "commit": str(commit() or "no checkout"),
        }


def cut(documents: Sequence[Document], window: int, max_tokens: int) -> list[Any]:
    """The first tokens of the documents in windows, none of which reaches over an end.

    Returns:
        int32 [n] each, n at most `window`.
    """
    found, left = [], max_tokens
    for document in documents:
        tokens = document.tokens[:left]
        found += [tokens[i : i + window] for i in range(0, len(tokens), window)]
        left -= len(tokens)
    return found


def _collected(
    pieces: Iterator[Piece], tokens: int, notes: Notes, what: str
) -> tuple[RoutingTrace, RoutingCounts]:
    """Everything traced, with remarks on how far it is."""
    from ..research.capture import collect

    def length(piece: Piece) -> int:
        return 0 if piece.trace is None else len(piece.trace)

    found = collect(announced(pieces, tokens, notes, what, length))
    assert found.trace is not None
    return found.trace, found.counts


def _refuse_below_one(limits: dict[str, int | None]) -> None:
    for flag, value in limits.items():
        if value is not None and value < 1:
            raise RequestError(f"{flag} is {value}; accepted is a whole number from 1 on")


def _as_text(summary: Summary, out: Path) -> str:
    rows = {
        "tokens": f"{summary.tokens:,}",
        "balance loss": f"{summary.pooled_balance_loss:.4f}, layers pooled",
    }
    for row in summary.layers:
        rows[f"layer {row.layer}"] = (
            f"{row.effective_experts:.1f} effective experts, variation {row.variation:.2f}, "
            f"busiest {row.largest_load:.2f} x even share, {row.unused} never chosen, "
            f"balance loss {row.balance_loss:.3f}"
        )
    return table({**rows, "report": str(out / "report.html")})
