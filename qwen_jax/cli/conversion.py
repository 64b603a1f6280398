"""What `convert` and `export` share: showing a plan, carrying it out, checking the result."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checkpoint.native import RECORD, read_record
from ..checkpoint.problems import listed
from ..errors import CheckpointError, RequestError
from .console import Notes, duration, size, table, write_json
from .shape import parse_size

if TYPE_CHECKING:
    from convert.plan import Plan


@dataclasses.dataclass(frozen=True)
class Job:
    """A folder to be written, as asked for on the command line.

    Attributes:
        plan: what to write.
        destination: where to; None for a dry run alone.
        max_shard_size: most bytes in one file, as text.
        resume: whether to go on with an interrupted run.
        verify: whether to check the result.
    """

    plan: Plan
    destination: str | None
    max_shard_size: str
    resume: bool
    verify: bool

    def run(self, notes: Notes, *, dry_run: bool, json: bool) -> None:
        """Show the plan, and unless it is a dry run carry it out and say what was written."""
        from convert.run import check, run

        limit = parse_size(self.max_shard_size, "--max-shard-size")
        if self.destination is not None:
            check(self.plan, Path(self.destination), resume=self.resume)
        text = table(plan_rows(self.plan))
        if dry_run:
            write_json(self.plan.as_json()) if json else print(text)
            return
        notes(text)
        destination = Path(str(self.destination))
        begin = time.perf_counter()
        with notes.progress(f"writing {destination.name}", self.plan.bytes_out) as advance:
            written = run(
                self.plan,
                destination,
                max_shard_bytes=limit,
                resume=self.resume,
                progress=advance,
            )
        seconds = time.perf_counter() - begin
        report = {**self.plan.as_json(), "destination": str(destination), "seconds": seconds}
        for note in written.notes:
            notes(note)
        if self.verify:
            verified(destination, written.checksums, notes)
            report["verified"] = True
        if json:
            write_json(report)
            return
        print(
            f"{destination}: {len(self.plan.tensors)} tensors, {size(self.plan.bytes_out)} "
            f"in {duration(seconds)} ({size(self.plan.bytes_out / max(seconds, 1e-9))}/s)"
            + (", verified" if self.verify else "")
        )


def plan_rows(plan: Plan) -> dict[str, str]:
    """The plan for a reader."""
    from convert.plan import ASSUMED_BYTES_PER_SECOND

    record, load = plan.record, plan.load
    rows = {
        "source": f"{plan.source}: {load.config.model_type}, {len(load.folder.tensors)} tensors, "
        f"{size(plan.bytes_in)}",
        "to write": f"{len(plan.tensors)} tensors, {size(plan.bytes_out)}, "
        f"{'native' if plan.native else 'Hugging Face layout'}",
        "matched": f"{len(load.sources)} tensors of the model"
        + (", with the MTP head" if load.mtp_layers else ""),
        "left out": _counts(record.skipped),
        "dequantised": _counts(record.formats),
        "merged": "; ".join(record.adapters),
        "added tokens": str(record.added_tokens or ""),
        "side files": ", ".join(plan.side_files),
        "files left": ", ".join(plan.files_left),
        "memory": f"about {size(plan.peak_memory)} at most, mapped files not counted",
        "time": f"about {duration(plan.seconds)} at {size(ASSUMED_BYTES_PER_SECOND)}/s",
        "notes": "; ".join(plan.notes),
    }
    return {name: text for name, text in rows.items() if text}


def _counts(kinds: Mapping[str, int]) -> str:
    return ", ".join(f"{count} x {kind}" for kind, count in kinds.items())


def verified(folder: Path, checksums: Mapping[str, str], notes: Notes) -> None:
    """Read a folder again, compare checksums, and run a short forward pass.

    Raises:
        CheckpointError: a tensor is not what was written, or the pass gives NaN or inf.
    """
    from convert.writing import verify_folder
    from convert.self_check import self_check
    from qwen_jax.checkpoint.safetensors_io import open_folder

    nbytes = open_folder(folder).nbytes
    with notes.progress(f"verifying {folder.name}", nbytes) as advance:
        mismatches = verify_folder(folder, checksums, advance)
    if mismatches:
        raise CheckpointError(
            f"{folder}: {len(mismatches)} tensors are not what was written: "
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
    record = read_record(folder)
    if record is None:
        raise RequestError(
            f"{folder} has no {RECORD}, so it was not written by convert and has no checksums to "
            "verify; give a destination to convert it"
        )
    verified(folder, record.checksums, notes)
    return {"folder": str(folder), "tensors": len(record.checksums), "verified": True}
