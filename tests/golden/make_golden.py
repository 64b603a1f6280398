"""Writes the model cases ``qwen*.json`` and ``qwen*.npz`` with transformers.

Made with transformers 5.24.0, torch 2.13.0 (CPU) and numpy 2.4.6. To regenerate, in an environment
with these three, safetensors and ml_dtypes:

    python tests/golden/make_golden.py            # all cases
    python tests/golden/make_golden.py qwen3      # only those named

The models run in float32 with eager attention and eager experts. Schema: README.md beside this.
"""

from __future__ import annotations

import contextlib
import json
import platform
import re
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import transformers
from cases import CASES, CLASSES, Case
from transformers import AutoConfig
from weights import FOLDER, make_tensors

PROMPT = 150
POSITIONS = (0, 1, 62, 63, 64, 65, 127, 128, 129, 148, 149)
GREEDY_PROMPT, GREEDY = 20, 24
BATCH_LENGTHS = (5, 20, 33)
PAD = 1


@contextlib.contextmanager
def widened() -> Iterator[None]:
    """Turns every float32 cast of the modelling code into float64."""
    narrow, cast = torch.float32, torch.Tensor.float
    torch.float32 = torch.float = torch.float64
    torch.Tensor.float = torch.Tensor.double
    try:
        yield
    finally:
        torch.float32 = torch.float = narrow
        torch.Tensor.float = cast


def text_config(case: Case) -> Any:
    """The transformers configuration of the text model, read as from a config.json."""
    config = AutoConfig.for_model(**json.loads(json.dumps(case.config)))
    config = config.get_text_config()
    config._attn_implementation = config._experts_implementation = "eager"
    return config


def disk_shapes(model: torch.nn.Module, case: Case) -> dict[str, list[int]]:
    """Key and shape of every tensor as the checkpoint stores it."""
    shapes: dict[str, list[int]] = {}
    for key, value in model.state_dict().items():
        if key == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        shape = list(value.shape)
        path = re.sub(r"^model\.", case.prefix, key)
        stem, _, last = path.rpartition(".")
        if stem.endswith("mlp.experts") and case.experts == "per_expert":
            for expert in range(shape[0]):
                if last == "gate_up_proj":
                    half = [shape[1] // 2, shape[2]]
                    shapes[f"{stem}.{expert}.gate_proj.weight"] = half
                    shapes[f"{stem}.{expert}.up_proj.weight"] = half
                else:
                    shapes[f"{stem}.{expert}.{last}.weight"] = shape[1:]
        else:
            shapes[path] = shape
    return shapes


def state_dict(model: torch.nn.Module, case: Case, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """The module's state from on-disk arrays: the inverse of :func:`disk_shapes`."""
    state = {}
    for key, value in model.state_dict().items():
        path = re.sub(r"^model\.", case.prefix, key)
        if key == "lm_head.weight" and model.config.tie_word_embeddings:
            path = f"{case.prefix}embed_tokens.weight"
        stem, _, last = path.rpartition(".")
        if stem.endswith("mlp.experts") and case.experts == "per_expert":
            names = ("gate_proj", "up_proj") if last == "gate_up_proj" else (last,)
            array = np.stack(
                [
                    np.concatenate([arrays[f"{stem}.{e}.{name}.weight"] for name in names])
                    for e in range(value.shape[0])
                ]
            )
        else:
            array = arrays[path]
        state[key] = torch.from_numpy(array.copy())
    return state


def moe_layers(model: torch.nn.Module) -> list[int]:
    """Indices of the layers with routed experts."""
    return [i for i, layer in enumerate(model.model.layers) if hasattr(layer.mlp, "experts")]


@torch.no_grad()
def trace(model: torch.nn.Module, tokens: np.ndarray) -> dict[str, torch.Tensor]:
    """One full forward over a row: logits, hidden states at the last position, routing."""
    hidden: list[torch.Tensor] = []
    routes: list[tuple[torch.Tensor, ...]] = []

    def keep_hidden(_module: Any, _args: Any, out: Any) -> None:
        hidden.append((out[0] if isinstance(out, tuple) else out)[0, -1])

    base = model.model
    hooks = [m.register_forward_hook(keep_hidden) for m in (base.embed_tokens, *base.layers)]
    hooks.append(base.norm.register_forward_hook(keep_hidden))
    sparse = moe_layers(model)
    for layer in sparse:
        gate = base.layers[layer].mlp.gate
        hooks.append(gate.register_forward_hook(lambda _m, _a, out: routes.append(out)))
    capture = {"output_router_logits": True} if sparse else {}
    out = model(torch.from_numpy(tokens[None].astype(np.int64)), use_cache=False, **capture)
    for hook in hooks:
        hook.remove()
    result = {"logits": out.logits[0], "hidden": torch.stack(hidden)}
    if sparse:
        result |= {
            "router_logits": torch.stack([route[0] for route in routes]),
            "router_weights": torch.stack([route[1] for route in routes]),
            "router_ids": torch.stack([route[2] for route in routes]),
            "aux_loss": out.aux_loss,
        }
    return result


@torch.no_grad()
def greedy(model: torch.nn.Module, prompt: np.ndarray) -> dict[str, np.ndarray]:
    """Greedy tokens, each from a full forward without a cache; no token stops it."""
    ids = torch.from_numpy(prompt[None].astype(np.int64))
    logits = []
    for _ in range(GREEDY):
        logits.append(model(ids, use_cache=False).logits[0, -1])
        ids = torch.cat([ids, logits[-1].argmax().view(1, 1)], dim=1)
    stacked = torch.stack(logits)
    return {
        "greedy_prompt": prompt,
        "greedy_tokens": ids[0, len(prompt) :].numpy().astype(np.int32),
        "greedy_margin": top2_margin(stacked),
        "greedy_logits": stacked.numpy(),
    }


@torch.no_grad()
def left_padded(model: torch.nn.Module, rows: list[np.ndarray]) -> dict[str, np.ndarray]:
    """Last-token logits of a ragged batch, with the positions that generation would pass."""
    width = max(map(len, rows))
    tokens = np.full((len(rows), width), PAD, np.int32)
    mask = np.zeros((len(rows), width), np.int8)
    for row, ids in enumerate(rows):
        tokens[row, width - len(ids) :] = ids
        mask[row, width - len(ids) :] = 1
    mask_t = torch.from_numpy(mask.astype(np.int64))
    positions = (mask_t.cumsum(1) - 1).masked_fill(mask_t == 0, 0)
    capture = {"output_router_logits": True} if moe_layers(model) else {}
    out = model(
        torch.from_numpy(tokens.astype(np.int64)),
        attention_mask=mask_t,
        position_ids=positions,
        use_cache=False,
        **capture,
    )
    arrays = {"batch_tokens": tokens, "batch_mask": mask, "batch_logits": out.logits[:, -1].numpy()}
    if capture:
        arrays["batch_aux_loss"] = out.aux_loss.numpy()
    return arrays


def top2_margin(logits: torch.Tensor) -> np.ndarray:
    """Largest minus second largest logit of each row."""
    top = logits.topk(2, dim=-1).values
    return (top[:, 0] - top[:, 1]).numpy().astype(np.float32)


def statistics(
    run: dict[str, torch.Tensor], exact: dict[str, torch.Tensor], margins: np.ndarray
) -> dict[str, Any]:
    """What a reader needs to choose tolerances; noise is relative to the logits' spread."""
    std = run["logits"].std().item()
    noise = (run["logits"].double() - exact["logits"]).abs().max().item() / std
    stats = {
        "logit_std": round(std, 4),
        "float32_noise": float(f"{noise:.2e}"),
        "greedy_margin_min": float(f"{margins.min():.2e}"),
    }
    if "router_ids" in run:
        count = run["router_weights"].shape[-1]
        ranked = run["router_logits"].sort(dim=-1, descending=True).values
        gap = (ranked[..., count - 1] - ranked[..., count]).min().item()
        loads = [torch.bincount(ids.flatten()).tolist() for ids in run["router_ids"]]
        stats |= {"router_logit_gap_min": float(f"{gap:.2e}"), "expert_counts": loads}
    return stats


def draw_tokens(seed: int, vocab_size: int) -> list[np.ndarray]:
    """Uniform token ids: the long row, the greedy prompt, and the batch's rows end to end."""
    stream = np.random.PCG64(seed).random_raw(PROMPT + GREEDY_PROMPT + sum(BATCH_LENGTHS))
    stream = (stream % np.uint64(vocab_size)).astype(np.int32)
    return np.split(stream, [PROMPT, PROMPT + GREEDY_PROMPT])


def make_case(name: str, case: Case) -> None:
    """Runs one case and writes its two files."""
    config = text_config(case)
    model_class = CLASSES[config.model_type]
    model = getattr(transformers, model_class)(config).eval()
    record: dict[str, Any] = {
        "case": name,
        "tests": case.tests,
        "model_class": model_class,
        "config": case.config,
        "prefix": case.prefix,
        "experts": case.experts if moe_layers(model) else None,
        "stored": case.stored,
        "stored_as": case.stored_as,
        "zero_centred_norm": config.model_type.startswith(("qwen3_next", "qwen3_5")),
        "layer_types": getattr(config, "layer_types", None) or ["full_attention"] * 4,
        "moe_layers": moe_layers(model),
        "tensors": disk_shapes(model, case),
    }
    if config.model_type == "qwen3_moe" and config.sliding_window:
        record["layer_types"] = ["sliding_attention"] * 4
    model.load_state_dict(state_dict(model, case, make_tensors(record)))

    tokens, prompt, rows = draw_tokens(case.seed, config.vocab_size)
    run = trace(model, tokens)
    logits = run["logits"]
    arrays = {
        "tokens": tokens,
        "positions": np.array(POSITIONS, np.int32),
        "logits": logits[list(POSITIONS)].numpy(),
        "logsumexp": logits.logsumexp(-1).numpy(),
        "argmax": logits.argmax(-1).numpy().astype(np.int32),
        "top2_margin": top2_margin(logits),
        "hidden": run["hidden"].numpy(),
    }
    if "router_ids" in run:
        arrays["router_ids"] = run["router_ids"].numpy().astype(np.int16)
        arrays["router_weights"] = run["router_weights"].numpy()
        arrays["aux_loss"] = run["aux_loss"].numpy()
    arrays |= greedy(model, prompt)
    arrays |= left_padded(model, np.split(rows, np.cumsum(BATCH_LENGTHS)[:-1]))
    with widened():
        exact = trace(model.double(), tokens)
    record["statistics"] = statistics(run, exact, arrays["greedy_margin"])
    record["versions"] = versions()
    np.savez_compressed(FOLDER / f"{name}.npz", **arrays)
    write_json(FOLDER / f"{name}.json", record)


def versions() -> dict[str, str]:
    """What made the numbers."""
    return {
        "python": platform.python_version(),
        "numpy": np.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def write_json(path: Any, content: Any) -> None:
    """JSON with one line a key and lists of scalars on one line."""
    text = json.dumps(content, indent=1, ensure_ascii=False)
    text = re.sub(r"\[\s*([^\[\]{}\"]*?)\s*\]", lambda m: f"[{' '.join(m.group(1).split())}]", text)
    if json.loads(text) != json.loads(json.dumps(content)):
        raise RuntimeError(f"{path}: folding the lists changed the content")
    path.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    for chosen in sys.argv[1:] or CASES:
        make_case(chosen, CASES[chosen])
        print(chosen, json.loads((FOLDER / f"{chosen}.json").read_text())["statistics"])
