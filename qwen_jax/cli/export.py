"""`qwen-jax export`: a native folder to one that transformers loads."""

from __future__ import annotations

from typing import Annotated, Literal

from cyclopts import Parameter

from ..errors import RequestError
from .console import Notes, accept_any_text
from .conversion import Job, find_source
from .options import Switch, Text


def export(
    source: str,
    destination: str | None = None,
    *,
    experts: Literal["source", "fused", "per-expert"] = "source",
    dry_run: Switch = False,
    resume: Switch = False,
    verify: Switch = False,
    revision: Text = None,
    max_shard_size: Text = None,
    json: Switch = False,
    quiet: Annotated[bool, Parameter(negative="", alias="-q")] = False,
) -> None:
    """Write a model in the Hugging Face layout that transformers loads, bit for bit.

    Args:
        source: a native folder, or any other that convert reads.
        destination: the folder to write; it must not exist.
        experts: fused (one tensor a layer), per-expert, or as in the folder that was converted.
        dry_run: say what would be done, and do nothing.
        resume: go on with a run that was interrupted.
        verify: read the result again, compare checksums, and run a short forward pass.
        revision: branch, tag or commit on the hub.
        max_shard_size: most bytes in one file (4GB by default).
        json: write one JSON object to standard output.
        quiet: write nothing to standard error but errors and warnings.
    """
    accept_any_text()
    notes = Notes(quiet=quiet)
    if destination is None and not dry_run:
        raise RequestError(
            "no destination: qwen-jax export SOURCE DESTINATION; without one, --dry-run says what "
            "would be done; see qwen-jax export --help"
        )
    job = Job.prepare(source, destination, max_shard_size, resume=resume, verify=verify)
    folder = find_source(source, revision, notes, dry_run=dry_run)
    from convert.to_hf import plan_export

    chosen = {"source": None, "fused": "fused", "per-expert": "per_expert"}[experts]
    plan = plan_export(folder, experts=chosen)
    job.run(plan, notes, dry_run=dry_run, json=json)
