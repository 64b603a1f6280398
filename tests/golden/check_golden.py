"""Checks the model cases against transformers, by ways that ``make_golden.py`` does not take.

    python tests/golden/check_golden.py

For every case: the folder of ``write_checkpoint`` is read by ``from_pretrained`` in one and in
three shards, run with the default attention and expert code, and decoded with a cache. Then each
entry of ``EDITS`` changes one thing that a case claims to exercise: the logits must move.
"""

from __future__ import annotations

import copy
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from weights import case_names, load_case, write_checkpoint

# (case, path of a config entry, new value or None to delete it)
EDITS: tuple[tuple[str, tuple[str, ...], Any], ...] = (
    ("qwen2", ("use_sliding_window",), True),
    ("qwen2", ("rope_theta",), None),
    ("qwen2_sliding", ("sliding_window",), 17),
    ("qwen2_sliding", ("max_window_layers",), 3),
    ("qwen2_moe", ("norm_topk_prob",), True),
    ("qwen2_moe", ("num_experts_per_tok",), 2),
    ("qwen2_moe_sliding", ("norm_topk_prob",), False),
    ("qwen2_moe_sliding", ("max_window_layers",), 2),
    ("qwen2_moe_sliding", ("use_sliding_window",), False),
    ("qwen3_yarn", ("rope_scaling",), None),
    ("qwen3_yarn", ("rope_scaling", "attention_factor"), 1.0),
    ("qwen3_yarn", ("rope_scaling", "original_max_position_embeddings"), None),
    ("qwen3_linear", ("rope_parameters", "factor"), 1.0),
    ("qwen3_linear", ("rope_parameters", "rope_theta"), 1000000.0),
    ("qwen3_linear", ("use_sliding_window",), False),
    ("qwen3_moe_sparse", ("norm_topk_prob",), False),
    ("qwen3_moe_tied", ("norm_topk_prob",), True),
    ("qwen3_moe_tied", ("use_sliding_window",), False),
    ("qwen3_next", ("partial_rotary_factor",), 0.5),
    ("qwen3_next", ("norm_topk_prob",), False),
    ("qwen3_next", ("rope_theta",), 10000.0),
    ("qwen3_next_yarn", ("rope_scaling",), None),
    ("qwen3_next_yarn", ("rope_scaling", "attention_factor"), 1.0),
    ("qwen3_5", ("text_config", "rms_norm_eps"), 1e-3),
    ("qwen3_5", ("text_config", "rope_parameters", "rope_theta"), 10000.0),
    ("qwen3_5_moe", ("text_config", "num_experts_per_tok"), 2),
    ("qwen3_5_moe_text", ("rope_parameters", "partial_rotary_factor"), 0.5),
    ("qwen3_5_moe_yarn", ("text_config", "rope_parameters", "rope_type"), "default"),
    ("qwen3_5_moe_yarn", ("text_config", "rope_parameters", "attention_factor"), 1.0),
)


def load(folder: Path, **options: Any) -> torch.nn.Module:
    """The model that transformers makes of a folder; every key must find its place."""
    model, report = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True, **options
    )
    problems = {kind: keys for kind, keys in report.items() if keys}
    if problems:
        raise RuntimeError(f"{folder}: {problems}")
    return model.eval()


@torch.no_grad()
def logits_of(model: torch.nn.Module, tokens: np.ndarray) -> torch.Tensor:
    """Logits [T, V] of one row."""
    return model(torch.from_numpy(tokens[None].astype(np.int64))).logits[0]


def check_case(name: str) -> None:
    """Prints the largest differences, relative to the logits' standard deviation."""
    case, arrays = load_case(name)
    std = float(arrays["logits"].std())
    expected = torch.from_numpy(arrays["logits"])
    rows = list(arrays["positions"])
    shown = []
    for shards, options in ((1, {"attn_implementation": "eager"}), (3, {})):
        with tempfile.TemporaryDirectory() as folder:
            model = load(write_checkpoint(folder, case, shards=shards), **options)
        got = logits_of(model, arrays["tokens"])
        shown.append(float((got[rows] - expected).abs().max()) / std)
    prompt = torch.from_numpy(arrays["greedy_prompt"][None].astype(np.int64))
    new = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=len(arrays["greedy_tokens"]),
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    cached = torch.stack(new.logits)[:, 0].numpy()
    shown.append(float(np.abs(cached - arrays["greedy_logits"]).max()) / std)
    same = new.sequences[0, prompt.shape[1] :].tolist() == arrays["greedy_tokens"].tolist()
    last = np.concatenate(
        [
            logits_of(model, row[keep.astype(bool)])[-1:].numpy()
            for row, keep in zip(arrays["batch_tokens"], arrays["batch_mask"], strict=True)
        ]
    )
    shown.append(float(np.abs(last - arrays["batch_logits"]).max()) / std)
    print(f"{name:18} std {std:.3f}  reload/default/cached/unpadded", *(f"{x:.1e}" for x in shown))
    if not same or max(shown) > 3e-4:
        raise RuntimeError(f"{name}: greedy tokens equal: {same}, differences {shown}")


def edited(config: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    """A copy of a configuration with one entry set, or deleted for None."""
    config = copy.deepcopy(config)
    inner = config
    for key in path[:-1]:
        inner = inner[key]
    if value is None:
        inner.pop(path[-1])
    else:
        inner[path[-1]] = value
    return config


def check_edit(name: str, path: tuple[str, ...], value: Any) -> None:
    """Prints how far the logits move when one entry of the configuration is changed."""
    case, arrays = load_case(name)
    changed = dict(case, config=edited(case["config"], path, value))
    with tempfile.TemporaryDirectory() as folder:
        model = load(write_checkpoint(folder, changed), attn_implementation="eager")
    got = logits_of(model, arrays["tokens"])[list(arrays["positions"])]
    moved = float((got - torch.from_numpy(arrays["logits"])).abs().max())
    print(f"{name:18} {'.'.join(path)} = {value}: moves by {moved:.2e}")
    if moved < 1e-2:
        raise RuntimeError(f"{name} does not depend on {path}")


if __name__ == "__main__":
    chosen = sys.argv[1:] or case_names()
    for case_name in chosen:
        check_case(case_name)
    for edit in EDITS:
        if edit[0] in chosen:
            check_edit(*edit)
