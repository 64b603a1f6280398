"""`qwen-jax convert`: any model folder to a native one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from ..errors import RequestError
from .console import Notes, accept_any_text, write_json
from .conversion import Job, find_source, refuse_idle, verify_native
from .options import Switch, Text


def convert(
    source: str,
    destination: str | None = None,
    *,
    dry_run: Switch = False,
    resume: Switch = False,
    verify: Switch = False,
    drop_mtp: Switch = False,
    keep_visual: Switch = False,
    adapter: Annotated[tuple[str, ...], Parameter(allow_leading_hyphen=True)] = (),
    add_tokens: Text = None,
    revision: Text = None,
    max_shard_size: Text = None,
    json: Switch = False,
    quiet: Annotated[bool, Parameter(negative="", alias="-q")] = False,
) -> None:
    """Convert a model folder to a native one, exactly, within one layer of memory.

    Read are bf16, f16 and f32 weights in every released layout, and FP8, GPTQ, AWQ and
    compressed-tensors ones, which become bf16. With --verify and no destination, a native folder
    is checked against its own record.

    Args:
        source: a model folder, an id on the Hugging Face hub such as Qwen/Qwen3.5-0.8B, or demo.
        destination: the folder to write; it must not exist.
        dry_run: say what would be done, and do nothing.
        resume: go on with a run that was interrupted.
        verify: read the result again, compare checksums, and run a short forward pass.
        drop_mtp: leave the multi-token prediction head out.
        keep_visual: take the vision tower along; it is left out and counted by default.
        adapter: a PEFT folder whose LoRA matrices are merged; may be repeated.
        add_tokens: a JSON file of tokens to add: strings, or objects with token, pieces, weights.
        revision: branch, tag or commit on the hub.
        max_shard_size: most bytes in one file (4GB by default).
        json: write one JSON object to standard output.
        quiet: write nothing to standard error but errors and warnings.
    """
    accept_any_text()
    notes = Notes(quiet=quiet)
    if destination is None and verify and not dry_run:
        given = {
            "--resume": resume,
            "--drop-mtp": drop_mtp,
            "--keep-visual": keep_visual,
            "--adapter": adapter,
            "--add-tokens": add_tokens is not None,
            "--max-shard-size": max_shard_size is not None,
        }
        refuse_idle([flag for flag, is_given in given.items() if is_given])
        report = verify_native(find_source(source, revision, notes), notes)
        write_json(report) if json else print(_verified(report))
        return
    if destination is None and not dry_run:
        raise RequestError(
            "no destination: qwen-jax convert SOURCE DESTINATION; without one, --dry-run says what "
            "would be done, and --verify checks a native folder"
        )
    job = Job.prepare(source, destination, max_shard_size, resume=resume, verify=verify)
    folder = find_source(source, revision, notes, dry_run=dry_run)
    from convert.from_hf import plan_conversion

    plan = plan_conversion(
        folder,
        keep_visual=keep_visual,
        drop_mtp=drop_mtp,
        adapters=[Path(path) for path in adapter],
        added_tokens=None if add_tokens is None else Path(add_tokens),
    )
    job.run(plan, notes, dry_run=dry_run, json=json)


def _verified(report: Mapping[str, Any]) -> str:
    return f"{report['folder']}: {report['tensors']} tensors, verified"
