"""Writes `adapters.json` and `adapters.npz`: LoRA adapters and the weights PEFT merges them into.

    python tests/golden/make_adapters.py            # cases of the releases installed
    python tests/golden/make_adapters.py qwen3_next # only those named

Most cases need transformers 5.24.0 and peft 0.21.2. Those that set `peft` or `transformers` were
made by that release, since its files look different; a run keeps the cases of other releases as
they are. Also needs torch (2.13.0, CPU), safetensors and ml_dtypes. Everything is float32; the
weights of the models are `make_weight` of their names. Each merged model gives the logits of the
adapted one.

`adapters.json` maps a case to `tests`, what it is for; `versions`; `config`, the content of the
model's config.json; `adapter_config`, as PEFT wrote it. `adapters.npz` has `CASE|adapter|KEY` for
each tensor that PEFT wrote, and `CASE|merged|KEY` for each tensor of the model that merging
changes, under the library's own name of it.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
import transformers
from cases import FULL, LINEAR, QWEN2_MOE, QWEN3, QWEN3_MOE, QWEN3_NEXT, _composite, _text_3_5
from safetensors.numpy import load_file
from transformers import AutoConfig, AutoModelForCausalLM
from weights import FOLDER, make_weight

SMALL = {
    **{"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8},
    **{"vocab_size": 40, "num_hidden_layers": 2, "intermediate_size": 20, "dtype": "float32"},
    **{"num_experts": 4, "moe_intermediate_size": 6, "shared_expert_intermediate_size": 10},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 4},
    **{"linear_value_head_dim": 3, "torch_dtype": "float32"},
}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
FUSED = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def small(config: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A still smaller configuration; only the fields that the original has."""
    return {name: SMALL.get(name, value) for name, value in config.items()} | fields


@dataclass(frozen=True)
class Case:
    """One adapter: its model, what LoraConfig gets, and the releases that make it."""

    config: dict[str, Any]
    lora: dict[str, Any]
    tests: str
    peft: str = "0.21.2"
    transformers: str = "5.24.0"
    # PEFT adds the update of tied matrices once for each side, unlike in its forward pass.
    merges_twice: bool = False


MOE = small(QWEN3_MOE)
SQUARE = small(QWEN3_MOE, moe_intermediate_size=8)
NEXT = small(QWEN3_NEXT, layer_types=[LINEAR, FULL], norm_topk_prob=True)
TIED = small(QWEN3, tie_word_embeddings=True, num_hidden_layers=1)

CASES = {
    "qwen3_moe": Case(
        MOE,
        {
            "r": 3,
            "lora_alpha": 5,
            "target_modules": ATTENTION,
            "target_parameters": [*FUSED, "mlp.gate.weight"],
            "rank_pattern": {
                **{"k_proj": 2, r"layers\.1\.self_attn\.[qv]_proj": 4, "v_proj": 1},
                **{"mlp.gate.weight": 1, "mlp.gate": 7, r"experts\.down.*": 2},
            },
            "alpha_pattern": {"^model.layers.0.self_attn.o_proj": 7, "gate_up_proj": 9, "q_pro": 1},
        },
        "attention, router and both fused parameters; ranks and alphas by pattern",
    ),
    "qwen3_moe_square": Case(
        SQUARE,
        {"r": 2, "target_modules": [], "target_parameters": FUSED[:1], "use_rslora": True},
        "gate_up_proj of 16 x 16, so that the factors fit both ways; rank-stabilised",
    ),
    "qwen3_moe_renamed": Case(
        MOE,
        {"r": 2, "target_modules": ["gate_proj", "up_proj", "down_proj", "gate", "q_proj"]},
        "old module names, which PEFT turns into parameters and patterns",
    ),
    "qwen3_moe_older": Case(
        MOE,
        {"r": 2, "target_modules": ["q_proj"], "target_parameters": FUSED},
        "fused parameters as releases before 0.19.1 lay the factors",
        peft="0.18.1",
    ),
    "qwen3_moe_older_square": Case(
        SQUARE,
        {"r": 2, "target_modules": [], "target_parameters": FUSED[:1]},
        "the same, and the factors fit both ways",
        peft="0.18.1",
    ),
    "qwen3_moe_per_expert": Case(
        small(QWEN3_MOE, mlp_only_layers=[1]),
        {
            "r": 2,
            "target_modules": ["gate_proj", "up_proj", "down_proj", "gate"],
            "rank_pattern": {"up_proj": 1, r"experts\.1\.down_proj": 3},
            "alpha_pattern": {r"experts\.2\..*": 3},
            "use_rslora": True,
        },
        "experts that are modules of their own, and a dense layer",
        peft="0.18.1",
        transformers="4.57.6",
    ),
    "qwen3_next": Case(
        NEXT,
        {
            "r": 2,
            "lora_alpha": 3,
            "use_rslora": True,
            "target_modules": [
                *("in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj", "shared_expert_gate"),
                *("embed_tokens", "lm_head"),
            ],
        },
        "interleaved projections, embedding and head, whose own weights are in the file too",
    ),
    "qwen3_next_saved": Case(
        NEXT,
        {
            "r": 2,
            "target_modules": ["q_proj"],
            "modules_to_save": ["linear_attn", "experts", "embed_tokens", "input_layernorm"],
        },
        "whole modules in the file",
    ),
    "qwen3_5_moe": Case(
        _composite(small(_text_3_5(True), layer_types=[LINEAR, FULL])),
        {
            "r": 2,
            "target_modules": [
                *("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj", *ATTENTION),
                *("shared_expert.gate_proj", "shared_expert.up_proj", "shared_expert.down_proj"),
                *("qkv", "embed_tokens"),
            ],
            "target_parameters": FUSED[::-1],
        },
        "keys under model.language_model., split projections, an update of the vision tower",
    ),
    "qwen2_moe": Case(
        small(QWEN2_MOE, mlp_only_layers=[1], qkv_bias=True),
        {
            "r": 2,
            "target_modules": r".*(mlp|shared_expert)\.(gate|up|down)_proj|.*\.v_proj",
            "modules_to_save": ["q_proj", "norm"],
        },
        "a dense layer, the shared expert; a projection saved as a whole with its bias",
    ),
    "qwen3_tied": Case(
        TIED,
        {"r": 2, "target_modules": ["embed_tokens", "q_proj"], "ensure_weight_tying": True},
        "one update of embedding and head, tied in training",
        merges_twice=True,
    ),
    "qwen3_tied_saved": Case(
        TIED,
        {
            **{"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
            "ensure_weight_tying": True,
        },
        "embedding and head saved as a whole, tied in training",
    ),
    "qwen3_tied_tokens": Case(
        TIED,
        {"r": 2, "target_modules": ["q_proj"], "trainable_token_indices": [17, 3, 30]},
        "three rows of a tied embedding",
    ),
    "qwen3_tokens": Case(
        small(QWEN3, num_hidden_layers=1),
        {
            **{"r": 2, "target_modules": ["q_proj"]},
            "trainable_token_indices": {"embed_tokens": [17, 3], "lm_head": [39, 0, 8]},
        },
        "different rows of embedding and head",
    ),
}


def build(config: dict[str, Any]) -> torch.nn.Module:
    """The model, with weights that are a function of their names."""
    config = json.loads(json.dumps(config))
    settings = AutoConfig.for_model(**config)
    for level in (settings, settings.get_text_config()):
        level._attn_implementation = level._experts_implementation = "eager"
    composite = "text_config" in config
    make = (
        transformers.Qwen3_5MoeForConditionalGeneration._from_config
        if composite
        else AutoModelForCausalLM.from_config
    )
    model = make(settings, dtype=torch.float32)
    fill(model, lambda name: True)
    return model.eval()


def fill(model: torch.nn.Module, chosen: Any) -> None:
    """Sets parameters by name."""
    for name, value in model.named_parameters():
        if chosen(name):
            # In place, so that what is shared, as tied updates are, stays so.
            value.data.copy_(
                torch.from_numpy(make_weight(name, tuple(value.shape), stored="float32"))
            )


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    return model(input_ids=torch.arange(40)[None]).logits


def trained(name: str) -> bool:
    return any(part in name for part in ("lora_", "modules_to_save", "trainable_tokens"))


def make(case: Case) -> tuple[dict[str, Any], dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Returns adapter_config.json, the adapter's tensors, and the merged tensors that changed."""
    model = build(case.config)
    before = {name: value.clone().numpy() for name, value in model.state_dict().items()}
    adapted = peft.get_peft_model(model, peft.LoraConfig(**case.lora)).eval()
    fill(adapted, trained)
    with tempfile.TemporaryDirectory() as folder:
        adapted.save_pretrained(folder)
        settings = json.loads((Path(folder) / "adapter_config.json").read_text())
        tensors = load_file(Path(folder) / "adapter_model.safetensors")
    expected = logits(adapted)
    delta = None
    if case.merges_twice:
        delta = adapted.get_input_embeddings().get_delta_weight("default")
    merged = adapted.merge_and_unload()
    if delta is not None:
        merged.get_input_embeddings().weight.data -= delta
    torch.testing.assert_close(logits(merged), expected, rtol=1e-3, atol=1e-3)
    state = {name: value.numpy() for name, value in merged.state_dict().items()}
    changed = {n: v for n, v in state.items() if not np.array_equal(v, before[n])}
    if merged.config.get_text_config().tie_word_embeddings:
        changed.pop("lm_head.weight", None)
    assert state.keys() == before.keys()
    return settings, tensors, changed


def _is_set(key: str, value: Any) -> bool:
    return isinstance(value, list) and key.startswith("target_")


def main() -> None:
    json_file, npz_file = FOLDER / "adapters.json", FOLDER / "adapters.npz"
    known = json.loads(json_file.read_text()) if json_file.exists() else {}
    arrays = dict(np.load(npz_file)) if npz_file.exists() else {}
    installed = (peft.__version__, transformers.__version__)
    for name in sys.argv[1:] or CASES:
        case = CASES[name]
        if (case.peft, case.transformers) != installed:
            print(f"{name}: kept; needs peft {case.peft}, transformers {case.transformers}")
            continue
        settings, tensors, merged = make(case)
        known[name] = {
            "tests": case.tests,
            "versions": dict(zip(("peft", "transformers"), installed, strict=True)),
            "config": case.config,
            # PEFT writes sets as lists, in any order.
            "adapter_config": {
                key: sorted(value) if _is_set(key, value) else value
                for key, value in settings.items()
            },
        }
        arrays = {key: v for key, v in arrays.items() if not key.startswith(f"{name}|")}
        arrays |= {f"{name}|adapter|{key}": value for key, value in tensors.items()}
        arrays |= {f"{name}|merged|{key}": value for key, value in merged.items()}
        print(f"{name}: {len(tensors)} tensors, {len(merged)} changed")
    known = {name: known[name] for name in CASES if name in known}
    lines = (f"{json.dumps(name)}: {json.dumps(case)}" for name, case in known.items())
    json_file.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    np.savez_compressed(npz_file, **dict(sorted(arrays.items())))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    main()
