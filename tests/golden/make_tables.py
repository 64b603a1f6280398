"""Writes ``rope.json`` and ``sampling.npz`` / ``sampling.json`` with transformers.

Made with the versions named in ``make_golden.py``. To regenerate:

    python tests/golden/make_tables.py
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from make_golden import versions, write_json
from transformers import AutoConfig
from transformers.generation import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeTextRotaryEmbedding
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRotaryEmbedding
from weights import FOLDER

ROTARY = {
    "qwen3": Qwen3RotaryEmbedding,
    "qwen3_next": Qwen3NextRotaryEmbedding,
    "qwen3_5_moe_text": Qwen3_5MoeTextRotaryEmbedding,
}
QWEN3 = {"model_type": "qwen3", "head_dim": 128, "max_position_embeddings": 40960}
NEXT = {"model_type": "qwen3_next", "head_dim": 256, "max_position_embeddings": 262144}
QWEN3_5 = {"model_type": "qwen3_5_moe_text", "head_dim": 256, "max_position_embeddings": 262144}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
MROPE = {"mrope_section": [11, 11, 10], "mrope_interleaved": True, "partial_rotary_factor": 0.25}


def _yarn(**more: Any) -> dict[str, Any]:
    """A released Qwen3 with a YaRN block in the old form."""
    return QWEN3 | {"rope_theta": 1000000.0, "rope_scaling": YARN | more}


ROPES: dict[str, dict[str, Any]] = {
    "default_1e6": QWEN3 | {"rope_theta": 1000000.0},
    "default_1e6_null_scaling": QWEN3 | {"rope_theta": 1000000.0, "rope_scaling": None},
    "default_absent_theta": QWEN3,
    "default_small_head": QWEN3 | {"rope_theta": 10000.0, "head_dim": 16},
    "default_new_form": QWEN3 | {"rope_parameters": {"rope_theta": 5e6, "rope_type": "default"}},
    "inner_theta_wins": QWEN3
    | {"rope_theta": 10000.0, "rope_parameters": {"rope_theta": 5e6, "rope_type": "default"}},
    "partial_top_level": NEXT | {"rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "partial_absent": NEXT | {"rope_theta": 1e7},
    "partial_half": NEXT | {"rope_theta": 1e7, "partial_rotary_factor": 0.5, "head_dim": 24},
    "partial_mrope": QWEN3_5 | {"rope_parameters": MROPE | {"rope_theta": 1e7}},
    "linear": QWEN3 | {"rope_theta": 1e6, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "linear_legacy_partial": NEXT
    | {"rope_theta": 1e7, "rope_scaling": {"type": "linear", "factor": 2.5}},
    "yarn": _yarn() | {"max_position_embeddings": 131072},
    "yarn_max_40960": _yarn(),
    "yarn_legacy_type": QWEN3
    | {"rope_theta": 1e6}
    | {"rope_scaling": {"type": "yarn"} | {k: v for k, v in YARN.items() if k != "rope_type"}},
    "yarn_absent_original": QWEN3
    | {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", "factor": 2.0}},
    "yarn_attention_factor": _yarn(attention_factor=1.25),
    "yarn_mscale": _yarn(mscale=1.0, mscale_all_dim=1.0),
    "yarn_mscale_unequal": _yarn(mscale=0.707, mscale_all_dim=1.0),
    "yarn_mscale_alone": _yarn(mscale=0.707),
    "yarn_no_truncate": _yarn(truncate=False),
    "yarn_betas": _yarn(beta_fast=16.0, beta_slow=2.0),
    "yarn_factor_1": _yarn(factor=1.0),
    "yarn_small_head": QWEN3
    | {"head_dim": 16, "rope_theta": 10000.0, "max_position_embeddings": 256}
    | {"rope_scaling": YARN | {"original_max_position_embeddings": 64}},
    "yarn_tiny_original": QWEN3
    | {"head_dim": 32, "rope_theta": 10000.0, "max_position_embeddings": 16}
    | {"rope_scaling": YARN | {"original_max_position_embeddings": 4}},
    "yarn_mrope": QWEN3_5
    | {"rope_parameters": MROPE | YARN | {"rope_theta": 1e7}}
    | {"max_position_embeddings": 1010000},
}
ROPES["yarn_mrope"]["rope_parameters"]["original_max_position_embeddings"] = 262144


def make_rope() -> None:
    """Inverse frequencies and attention factor of each configuration."""
    entries = {}
    for name, fields in ROPES.items():
        config = AutoConfig.for_model(**{key: _copy(value) for key, value in fields.items()})
        rotary = ROTARY[config.model_type](config)
        inv_freq = rotary.inv_freq.numpy()
        entries[name] = {
            "config": fields,
            "rope_parameters": config.rope_parameters,
            "rotary_dim": 2 * len(inv_freq),
            "attention_factor": float(rotary.attention_scaling),
            "inv_freq": [float(str(value)) for value in inv_freq],
        }
    write_json(FOLDER / "rope.json", {"versions": versions(), "cases": entries})


def _copy(value: Any) -> Any:
    """Configurations keep and change the dictionaries they are given."""
    return dict(value) if isinstance(value, dict) else value


SAMPLING: dict[str, dict[str, Any]] = {
    "repetition_1.3": {"repetition_penalty": 1.3},
    "repetition_0.8": {"repetition_penalty": 0.8},
    "temperature_0.6": {"temperature": 0.6},
    "temperature_1.7": {"temperature": 1.7},
    "top_k_1": {"top_k": 1},
    "top_k_5": {"top_k": 5},
    "top_k_80": {"top_k": 80},
    "top_p_0.05": {"top_p": 0.05},
    "top_p_0.5": {"top_p": 0.5},
    "top_p_0.95": {"top_p": 0.95},
    "min_p_0.1": {"min_p": 0.1},
    "min_p_0.5": {"min_p": 0.5},
    "four_top_p_0.6": {"logits": "four", "top_p": 0.6},
    "four_top_p_0.79": {"logits": "four", "top_p": 0.79},
    "four_top_p_0.8": {"logits": "four", "top_p": 0.8},
    "four_top_p_0.81": {"logits": "four", "top_p": 0.81},
    "four_min_p_0.25": {"logits": "four", "min_p": 0.25},
    "qwen_thinking": {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    "qwen_coder": {"repetition_penalty": 1.05, "temperature": 0.7, "top_k": 20, "top_p": 0.8},
    "everything": {
        "repetition_penalty": 1.2,
        "temperature": 1.4,
        "top_k": 12,
        "top_p": 0.9,
        "min_p": 0.08,
    },
}
# In the order in which generation applies them.
PROCESSORS = {
    "repetition_penalty": RepetitionPenaltyLogitsProcessor,
    "temperature": TemperatureLogitsWarper,
    "top_k": TopKLogitsWarper,
    "top_p": TopPLogitsWarper,
    "min_p": MinPLogitsWarper,
}


def sampling_inputs() -> dict[str, np.ndarray]:
    """Logits [4, 50] (row 2 with ties, row 3 all negative), history, and a row of four."""
    words = np.random.PCG64(1).random_raw(200) >> np.uint64(11)
    logits = ((words.astype(np.float64) * 2.0**-52 - 1.0) * 4.0).astype(np.float32).reshape(4, 50)
    logits[2] = np.round(logits[2])
    logits[3] -= 5.0
    top = logits.argmax(-1)
    history = np.array([[0, 1, 1, 7, 49], [3] * 5, [10, 20, 30, 40, 20], [5, 6, 7, 8, 9]], np.int32)
    history[:, 2] = top
    four = np.log(np.array([[0.5, 0.3, 0.15, 0.05]])).astype(np.float32)
    return {"logits": logits, "history": history, "four": four}


def make_sampling() -> None:
    """Masked logits and probabilities of each setting, and how close its top-p cut was."""
    arrays = sampling_inputs()
    cases = {}
    for name, setting in SAMPLING.items():
        scores = torch.from_numpy(arrays[setting.get("logits", "logits")]).clone()
        history = torch.from_numpy(arrays["history"][: len(scores)].astype(np.int64))
        cases[name] = dict(setting)
        for key, make in PROCESSORS.items():
            if key not in setting:
                continue
            before, scores = scores, make(setting[key])(history, scores)
            if key == "top_p":
                cases[name] |= cut_report(before, scores, setting[key])
        arrays[f"{name}.logits"] = scores.numpy()
        arrays[f"{name}.probs"] = scores.softmax(-1).numpy()
    np.savez_compressed(FOLDER / "sampling.npz", **arrays)
    content = {"versions": versions(), "order": list(PROCESSORS), "cases": cases}
    write_json(FOLDER / "sampling.json", content)


def cut_report(before: torch.Tensor, after: torch.Tensor, top_p: float) -> dict[str, Any]:
    """Distance of the nearest cumulative probability from the cut, and rows that cut a tie."""
    cumulative = before.sort(dim=-1).values.double().softmax(-1).cumsum(-1)
    dropped = (after == -torch.inf) & (before != -torch.inf)
    lowest_kept = after.masked_fill(after == -torch.inf, torch.inf).amin(-1, keepdim=True)
    tied = (dropped & (before == lowest_kept)).any(-1)
    return {
        "top_p_margin": float(f"{(cumulative - (1 - top_p)).abs().min().item():.1e}"),
        "top_p_tied_rows": torch.nonzero(tied).flatten().tolist(),
    }


if __name__ == "__main__":
    make_rope()
    make_sampling()
