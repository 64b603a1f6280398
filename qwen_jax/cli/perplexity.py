"""`qwen-jax perplexity`: how well a model predicts text."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from .console import Notes, accept_any_text, table, write_json
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

_WINDOWS, _ACTIVATIONS = WindowFlags(), ActivationFlags()


def perplexity(
    model: str,
    text: str,
    /,
    *texts: str,
    revision: Text = None,
    windows: WindowFlags = _WINDOWS,
    activations: ActivationFlags = _ACTIVATIONS,
    dtype: DType | None = None,
    implementation: Kernels | None = None,
    json: Switch = False,
    quiet: Annotated[bool, Parameter(negative="", alias="-q")] = False,
) -> None:
    """Say how well a model predicts text: exp of the mean loss of a token.

    Args:
        model: a model folder, demo, or the id of a model on the Hub (organisation/name).
        text: a text file, or token ids as .npy or .jsonl.
        texts: further ones; windows do not reach from one into the next.
        revision: branch, tag or commit of a Hub model; the main branch by default.
        windows: how the text is cut.
        activations: inputs of matrices in few bits.
        dtype: of weights and activations; the model's own by default, float32 on a CPU.
        implementation: run every operation so, or fail: reference (plain JAX) or triton (GPU
            kernels); by default each call runs on the first that takes it.
        json: write one JSON object.
        quiet: write nothing to standard error but errors and warnings.
    """
    from ..evaluate import perplexity as measure
    from ..evaluate import score

    notes, names = Notes(quiet=quiet), (text, *texts)
    accept_any_text()
    activations.check(names)
    folder = ModelFolder.open(model, dtype, notes, revision, implementation)
    refuse_long_window(folder, windows.window)
    cut = windows.windows(read_texts(names, folder, windows.window))
    calibrated_on = fitted_to(folder, names)
    loaded = activations.apply(folder.load(notes), folder, windows)
    scores = score(loaded, cut, batch_size=windows.batch_size)
    result = measure(announced(scores, cut.scored, notes, model, scored), what=model)
    if json:
        write_json(
            {
                "model": model,
                "dtype": folder.config.dtype,
                "calibrated_on": calibrated_on,
                "activations": activations.as_json(),
                **windows_as_json(cut, names),
                **perplexity_as_json(result),
            }
        )
        return
    print(table({"text": windows_as_text(cut), "perplexity": perplexity_as_text(result)}))
