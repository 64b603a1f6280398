"""`qwen-jax evaluate`: tasks of EleutherAI's lm-evaluation-harness."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from ..errors import RequestError
from .console import Notes, accept_any_text, write_json
from .loading import ModelFolder
from .options import DType, Kernels, MaybeFloat, MaybeWhole, Switch, Text, Whole

if TYPE_CHECKING:
    from ..text import Tokenizer


def evaluate(
    model: str,
    *,
    tasks: Annotated[str, Parameter(alias="-t")],
    num_fewshot: Annotated[MaybeWhole, Parameter(alias=("--num_fewshot", "-f"))] = None,
    limit: Annotated[MaybeFloat, Parameter(alias="-L")] = None,
    apply_chat_template: Annotated[
        bool, Parameter(negative="", alias="--apply_chat_template")
    ] = False,
    system_instruction: Annotated[Text, Parameter(alias="--system_instruction")] = None,
    enable_thinking: bool | None = None,
    gen_kwargs: Annotated[Text, Parameter(alias="--gen_kwargs")] = None,
    include_path: Annotated[str | None, Parameter(alias="--include_path")] = None,
    batch_size: Annotated[Whole, Parameter(alias=("--batch_size", "-b"))] = 8,
    max_model_len: MaybeWhole = None,
    revision: Text = None,
    dtype: DType | None = None,
    implementation: Kernels | None = None,
    json: Switch = False,
    quiet: Annotated[bool, Parameter(negative="", alias="-q")] = False,
) -> None:
    """Run tasks of lm-eval, which the extra `eval` installs.

    Flags that lm-eval has are called as there, and mean the same.

    Args:
        model: a model folder, demo, or the id of a model on the Hub (organisation/name).
        tasks: names of tasks or groups, separated by commas.
        num_fewshot: examples in front of each question; the task decides by default.
        limit: take this many questions of each task, or a share of them below 1.
        apply_chat_template: put questions into the model's chat template.
        system_instruction: the system message.
        enable_thinking: whether the model thinks before it answers; the template decides by
            default.
        gen_kwargs: arguments of generation, such as temperature=0.7,do_sample=true.
        include_path: a folder with further tasks.
        batch_size: questions in one forward pass (8 by default).
        max_model_len: most tokens that the model reads at a time (2048 by default); longer
            contexts lose their first ones.
        revision: branch, tag or commit of a Hub model; the main branch by default.
        dtype: of weights and activations; the model's own by default, float32 on a CPU.
        implementation: run every operation so, or fail: reference (plain JAX) or triton (GPU
            kernels); by default each call runs on the first that takes it.
        json: write lm-eval's results as one JSON object.
        quiet: write nothing to standard error but errors and warnings.
    """
    from ..evaluate.harness import as_lm, require_lm_eval

    notes = Notes(quiet=quiet)
    accept_any_text()
    require_lm_eval()
    if not apply_chat_template and enable_thinking is not None:
        raise RequestError(
            "--enable-thinking is read by the chat template alone; add "
            "--apply-chat-template, or leave it out"
        )
    manager, names = _find_tasks(tasks, include_path)
    folder = ModelFolder.open(model, dtype, notes, revision, implementation)
    tokenizer = _tokenizer(folder)
    if apply_chat_template and not tokenizer.has_chat_template:
        raise RequestError(f"{model} has no chat template; leave out --apply-chat-template")
    lm = as_lm(
        folder.load(notes),
        tokenizer,
        name=model,
        batch_size=batch_size,
        max_model_len=max_model_len,
        enable_thinking=enable_thinking,
    )
    from lm_eval import simple_evaluate  # pyright: ignore[reportMissingImports]

    results = simple_evaluate(
        lm,
        tasks=names,
        num_fewshot=num_fewshot,
        limit=limit,
        apply_chat_template=apply_chat_template,
        system_instruction=system_instruction,
        gen_kwargs=gen_kwargs,
        batch_size=batch_size,
        task_manager=manager,
        log_samples=False,
    )
    if json:
        write_json({"model": model, "dtype": folder.config.dtype, **_plain(results)})
        return
    from lm_eval.utils import make_table  # pyright: ignore[reportMissingImports]

    print(make_table(results))
    if results.get("groups"):
        print(make_table(results, "groups"))


def _find_tasks(tasks: str, include_path: str | None) -> tuple[Any, list[str]]:
    """The tasks by name, before any weight is read."""
    from pathlib import Path

    if include_path is not None and not Path(include_path).is_dir():
        raise RequestError(f"--include-path {include_path} is not a folder; give one with tasks")
    from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]

    manager = TaskManager(include_path=include_path)
    asked = [name.strip() for name in tasks.split(",") if name.strip()]
    unknown = [name for name in asked if not manager.match_tasks([name])]
    if unknown or not asked:
        raise RequestError(
            f"--tasks is {tasks!r}: lm-eval knows no task {', '.join(unknown)!r}; lm-eval ls tasks "
            "lists them, and --include-path adds a folder"
        )
    return manager, manager.match_tasks(asked)


def _tokenizer(folder: ModelFolder) -> Tokenizer:
    if folder.tokenizer is None:
        raise RequestError(f"{folder.path} has no tokenizer, which tasks of text need")
    return folder.tokenizer


def _plain(results: Any) -> dict[str, Any]:
    """What JSON can hold of lm-eval's results."""
    import json

    from lm_eval.utils import handle_non_serializable  # pyright: ignore[reportMissingImports]

    kept = {name: value for name, value in results.items() if name != "samples"}
    return json.loads(json.dumps(kept, default=handle_non_serializable))
