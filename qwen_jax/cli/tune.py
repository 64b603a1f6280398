"""`qwen-jax tune`: how the kernels are cut best on this GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from .console import Notes, accept_any_text, table, write_json
from .options import MaybeWhole, Switch, Text, Whole, WholeNumbers
from .tune_request import TuneRequest


def tune(
    model: str,
    *,
    batch_size: WholeNumbers = (1, 8, 32),
    prompt_tokens: WholeNumbers = (512,),
    context: Whole = 512,
    recipe: Text = None,
    num_layers: MaybeWhole = None,
    budget_seconds: Whole = 600,
    output: Path | None = None,
    json: Switch = False,
    quiet: Annotated[bool, Parameter(negative="", alias="-q")] = False,
) -> None:
    """Try how the kernels may be cut, in a few layers of a model, and keep what is faster here.

    What is found counts for this kind of GPU, the model's shapes, and this minor version of JAX;
    all else is cut by heuristics. It is kept in ~/.local/share/qwen-jax/tuning, or in the folder
    that QWEN_JAX_TUNING names, where every later command finds it.

    Args:
        model: a released shape, a model folder, demo, or the id of a model on the Hub
            (organisation/name); its weights are not read.
        batch_size: rows of decode steps (1, 8 and 32 by default); may be repeated.
        prompt_tokens: tokens of a prompt (512 by default); may be repeated.
        context: tokens before each row of a decode step (512 by default).
        recipe: codes of the weights: q3, q3-small, q4, q8 or experts-only; none by default.
        num_layers: only so many layers; by default four, or more if that is not all kinds.
        budget_seconds: begin nothing after so many seconds (600 by default).
        output: write this file in place of the one that commands read.
        json: write one JSON object to standard output.
        quiet: write nothing to standard error but errors and warnings.
    """
    accept_any_text()
    request = TuneRequest(
        model=model,
        batch_sizes=batch_size,
        prompt_tokens=prompt_tokens,
        context=context,
        recipe=recipe,
        num_layers=num_layers,
        budget_seconds=budget_seconds,
        output=output,
    )
    from .tuning import as_rows
    from .tuning import tune as run

    result = run(request, Notes(quiet=quiet))
    if json:
        write_json(result)
    else:
        print(table(as_rows(result)))
