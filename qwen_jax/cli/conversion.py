"""What `convert` and `export` share: showing a plan, carrying it out, checking the result."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ..checkpoint.formats import declares_codes
from ..checkpoint.native import RECORD, read_record
from ..checkpoint.problems import listed, show
from ..errors import CheckpointError, RequestError
from .console import Notes, duration, size, table, write_json
from .shape import parse_size

if TYPE_CHECKING:
    from convert.plan import Plan
    from convert.writing import Written

DEFAULT_SHARD_SIZE = "4GB"


@dataclasses.dataclass(frozen=True)
class Job:
    """A folder to be written, as asked for on the command line.

    Attributes:
        destination: where to; None for a dry run alone.
        max_shard_bytes: most bytes in one file.
        resume: whether to go on with an interrupted run.
        verify: whether to check the result.
    """

    destination: Path | None
    max_shard_bytes: int
    resume: bool
    verify: bool

    @classmethod
    def prepare(
        cls,
        source: str,
        destination: str | None,
        max_shard_size: str | None,
        *,
        resume: bool,
        verify: bool,
    ) -> Job:
        """Check what can be checked before anything is fetched or read.

        Raises:
            RequestError: a size that is none, or an empty name.
            CheckpointError: the destination cannot be written.
        """
        from convert.writing import check_destination

        if not source.strip():
            raise RequestError("the source is empty; give a model folder, a Hub id, or demo")
        text = DEFAULT_SHARD_SIZE if max_shard_size is None else max_shard_size
        limit = parse_size(text, "--max-shard-size")
        if destination is None:
            if resume:
                refuse_idle(["--resume"])
            return cls(None, limit, resume, verify)
        if not destination:
            raise RequestError("the destination is empty; give the name of a new folder")
        job = cls(Path(destination), limit, resume, verify)
        if Path(destination).resolve().is_relative_to(Path(source).resolve()):
            raise CheckpointError(
                f"{destination} is the source or inside it; give a folder outside {source}"
            )
        if not job.finished:
            check_destination(Path(destination), resume=resume, nbytes=0)
        return job

    @property
    def finished(self) -> bool:
        """Whether `resume` meets a finished folder; the plan will tell whether it is this one's."""
        from convert.writing import is_finished

        return self.resume and self.destination is not None and is_finished(self.destination)

    def run(
        self,
        plan: Plan,
        notes: Notes,
        *,
        dry_run: bool,
        json: bool,
        text: str | None = None,
        facts: Mapping[str, Any] = MappingProxyType({}),
        write: Callable[..., Written] | None = None,
        outcome: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Show a plan, and unless it is a dry run carry it out and say what was written.

        Args:
            plan: what to write.
            notes: told the plan and what happens.
            dry_run: show the plan alone.
            json: write JSON to standard output.
            text: the plan for a reader; that of `plan_rows` if None.
            facts: what else there is to say of the plan as JSON.
            write: writes the plan's folder, as `convert.run.run` does, which is used if None.
            outcome: what else there is to say as JSON once that is done; `write` may fill it.
        """
        from convert.run import check, holds

        planned = {**plan.as_json(), **facts}
        if self.destination and self.finished and holds(plan, self.destination):
            self._tell_complete(plan, planned, self.destination, notes, json=json)
            return
        if self.destination is not None:
            check(plan, self.destination, resume=self.resume)
        text = table(plan_rows(plan)) if text is None else text
        if dry_run or self.destination is None:
            write_json(planned) if json else print(text)
            return
        notes(text)
        written = self._write(plan, self.destination, notes, write)
        seconds = written.seconds
        done = {"destination": str(self.destination), "seconds": seconds, **outcome}
        report = {**planned, **done}
        for note in written.notes:
            notes(note)
        if self.verify:
            try:
                verified(self.destination, written.checksums, notes)
            except KeyboardInterrupt:
                notes(f"stopped; {self.destination} is complete, but not verified")
                raise
            report["verified"] = True
        if json:
            write_json(report)
            return
        print(
            f"{self.destination}: {len(plan.tensors)} tensors, {size(plan.bytes_out)} "
            f"in {duration(seconds)} ({size(plan.bytes_out / max(seconds, 1e-9))}/s)"
            + (", verified" if self.verify else "")
        )

    def _tell_complete(
        self,
        plan: Plan,
        planned: Mapping[str, Any],
        destination: Path,
        notes: Notes,
        *,
        json: bool,
    ) -> None:
        report = {**planned, "destination": str(destination), "complete": True}
        if self.verify and plan.native:
            report |= verify_native(destination, notes)
        compared = "verified" if "verified" in report else "values not compared"
        write_json(report) if json else print(f"{destination}: complete already, {compared}")

    def _write(
        self,
        plan: Plan,
        destination: Path,
        notes: Notes,
        write: Callable[..., Written] | None,
    ) -> Written:
        from convert.run import run
        from convert.writing import partial_folder

        try:
            with notes.progress(f"writing {destination.name}", plan.bytes_out) as advance:
                return (write or run)(
                    plan,
                    destination,
                    max_shard_bytes=self.max_shard_bytes,
                    resume=self.resume,
                    progress=advance,
                )
        except KeyboardInterrupt:
            work = partial_folder(destination)
            kept = f"finished files are in {work}; the same command with --resume goes on"
            notes(f"stopped; {kept if work.exists() else 'nothing was finished, nothing is kept'}")
            raise


def find_source(name: str, revision: str | None, notes: Notes, *, dry_run: bool = False) -> Path:
    """The folder that a model argument means, fetched from the Hub where it is not cached.

    Raises:
        RequestError: a dry run of a Hub model whose weights would have to be fetched first.
        CheckpointError: no such folder, the Hub model cannot be fetched, or its configuration says
            that its weights are quantised in a way that is not read.
        ConfigError: the Hub model's configuration is not implemented.
    """
    from .. import hub
    from ..loading import find_folder

    if not hub.is_hub_id(name):
        return find_folder(name, revision)
    if dry_run:
        folder = find_folder(name, revision, weights=False, quiet=notes.quiet)
        if not hub.has_weights(folder):
            raise RequestError(
                f"--dry-run of {name}: a plan is made from the headers of its weights, which are "
                f"not cached; run hf download {name} first, or convert without --dry-run"
            )
        return folder
    from convert.logical import refuse_unread

    notes(f"{name}: fetching from the Hub what is not cached")
    refuse_unread(find_folder(name, revision, weights=False, quiet=notes.quiet))
    return find_folder(name, revision, quiet=notes.quiet)


def refuse_idle(flags: Sequence[str]) -> None:
    """Raise `RequestError` if there are flags, none of which means anything without a destination.

    Args:
        flags: those that were given.
    """
    if flags:
        raise RequestError(
            f"{', '.join(flags)}: without a destination nothing is written, so this has no effect; "
            "give a destination, or leave it out"
        )


def plan_rows(plan: Plan) -> dict[str, str]:
    """The plan for a reader."""
    from convert.plan import ASSUMED_BYTES_PER_SECOND

    record, load = plan.now, plan.load
    rows = {
        "source": f"{show(plan.source)}: {load.config.model_type}, "
        f"{len(load.folder.tensors)} tensors, {size(plan.bytes_in)}",
        "to write": f"{len(plan.tensors)} tensors, {size(plan.bytes_out)}, "
        f"{'native' if plan.native else 'Hugging Face layout'}",
        "matched": f"{len(load.sources)} tensors of the model"
        + (", with the MTP head" if load.mtp_layers else ""),
        "left out": _counts(record.skipped)
        + (" (--keep-visual takes the vision tower along)" if "visual" in record.skipped else ""),
        "dequantised": _counts(record.formats),
        "merged": "; ".join(map(show, record.adapters)),
        "added tokens": str(record.added_tokens or ""),
        "side files": listed(plan.side_files),
        "files left": listed(plan.files_left),
        "memory": f"about {size(plan.peak_memory)}, mapped files not counted; with --verify "
        "also that of one layer",
        "time": f"about {duration(plan.seconds)} at {size(ASSUMED_BYTES_PER_SECOND)}/s",
        "notes": "; ".join(plan.notes),
    }
    return {name: text for name, text in rows.items() if text}


def _counts(kinds: Mapping[str, int]) -> str:
    return ", ".join(f"{count} x {show(kind)}" for kind, count in kinds.items())


def verified(folder: Path, checksums: Mapping[str, str], notes: Notes) -> None:
    """Read a folder again, compare checksums, and run a short forward pass.

    Raises:
        CheckpointError: a tensor is not what was written, or the pass gives NaN or inf.
    """
    from convert.self_check import self_check
    from convert.writing import verify_folder
    from qwen_jax.checkpoint.safetensors_io import open_folder

    nbytes = open_folder(folder).nbytes
    with notes.progress(f"verifying {folder.name}", nbytes) as advance:
        mismatches = verify_folder(folder, checksums, advance)
    if mismatches:
        raise CheckpointError(
            f"{folder}: tensors that are not as they were written ({len(mismatches)}): "
            f"{listed(mismatches)}. The disk or the files are damaged: convert again"
        )
    with notes.progress(f"running {folder.name}", nbytes) as advance:
        fault = self_check(folder, progress=advance)
    if fault is not None:
        raise CheckpointError(
            f"{folder}: every tensor is as it was written, but the model does not run: {fault}. "
            "Check the source"
        )


def verify_native(folder: Path, notes: Notes) -> dict[str, Any]:
    """Check a native folder against its own record; a report for `--json`."""
    from ..checkpoint.checksums import refuse_changed_files

    record = read_record(folder)
    if record is None:
        raise RequestError(
            f"{folder} has no {RECORD}, so it was not written by convert and has no checksums to "
            "verify; give a destination to convert it"
        )
    refuse_changed_files(folder, record)
    if declares_codes(folder) and not record.files:
        notes("recipe and tokenizer are not compared: an older version recorded nothing of them")
    verified(folder, record.checksums, notes)
    return {"folder": str(folder), "tensors": len(record.checksums), "verified": True}
