"""`qwen-jax convert`: any model folder to a native one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from ..errors import RequestError
from .console import Notes, write_json
from .conversion import Job, verify_native
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
    max_shard_size: str = "4GB",
    json: Switch = False,
    quiet: Annotated[bool, Parameter(negative="", alias="-q")] = False,
) -> None:
    """Convert a model folder to a native one, exactly, within one layer of memory.

    Read are bf16, f16 and f32 weights in every released layout, and FP8, GPTQ, AWQ and
    compressed-tensors ones, which become bf16. With --verify and no destination, a native folder
    is checked.

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
    from ..loading import find_folder

    notes = Notes(quiet=quiet)
    folder = find_folder(source, revision)
    if destination is None and verify and not dry_run:
        report = verify_native(folder, notes)
        write_json(report) if json else print(f"{folder}: {report['tensors']} tensors, verified")
        return
    if destination is None and not dry_run:
        raise RequestError(
            "no destination: qwen-jax convert SOURCE DESTINATION; without one, --dry-run says what "
            "would be done, and --verify checks a native folder"
        )
    from convert.from_hf import plan_conversion

    plan = plan_conversion(
        folder,
        keep_visual=keep_visual,
        drop_mtp=drop_mtp,
        adapters=[Path(path) for path in adapter],
        added_tokens=None if add_tokens is None else Path(add_tokens),
    )
    Job(plan, destination, max_shard_size, resume=resume, verify=verify).run(
        notes, dry_run=dry_run, json=json
    )
