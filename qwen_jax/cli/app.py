"""The program and its verbs. A verb's module is imported when the verb is called."""

from __future__ import annotations

from cyclopts import App, Parameter

from .. import __version__

VERBS = {
    "generate": "Complete a prompt, or answer it with --chat.",
    "chat": "Talk with a model, turn by turn.",
    "inspect": "Say what a model is and what it costs, without loading it.",
    "convert": "Convert any model folder to a native one.",
    "quantize": "Write a model in codes of 3, 4 or 8 bits.",
    "distill": "Fit the codes of a model to what the float model predicts.",
    "export": "Write a model in the Hugging Face layout.",
    "train": "Train a model on text, or go on training one.",
    "diff": "Compare two model folders tensor by tensor.",
    "perplexity": "Say how well a model predicts text.",
    "divergence": "Say how far a model's predictions are from a base's.",
    "evaluate": "Run tasks of lm-eval.",
    "routing": "Report which experts a text uses.",
    "bench": "Measure prefill, first-token and inter-token times.",
    "tune": "Find how kernels are cut best on this GPU.",
}

app = App(
    name="qwen-jax",
    help="Qwen MoE models in JAX.",
    version=__version__,
    help_format="plaintext",
    default_parameter=Parameter(negative_iterable="", show_default=False),
    suppress_keyboard_interrupt=False,
)
for _verb, _help in VERBS.items():
    app.command(f"{__package__}.{_verb}:{_verb}", name=_verb, help=_help)
