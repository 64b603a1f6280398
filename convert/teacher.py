"""The float model that codes were made from: whether a given one is it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from qwen_jax.checkpoint.formats import declares_codes
from qwen_jax.checkpoint.plan import LoadPlan, plan_load
from qwen_jax.checkpoint.problems import listed
from qwen_jax.checkpoint.safetensors_io import open_folder
from qwen_jax.config import QwenConfig
from qwen_jax.errors import CheckpointError
from qwen_jax.model import CausalLM

from .calibrate import at
from .model_fit import format_of, judged, start, tensors_in_codes
from .quantization.folding import fold_of, fold_weights, folded_factors

# Norm of what codes miss, over that of the weights: about twice what rounding to levels spread over
# a group's range gives. Two models that have nothing in common are at 1.4.
MOST_MISSED = {3: 0.6, 4: 0.4, 8: 0.1}
# What two models may differ in that compute the same.
_NO_ARCHITECTURE = (
    "dtype",
    "implementation",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "router_aux_loss_coef",
    "mtp_num_hidden_layers",
)


def plan_teacher(folder: Path, student: LoadPlan) -> LoadPlan:
    """Where a teacher's tensors come from.

    Args:
        folder: of the teacher.
        student: the plan of the folder in codes.

    Raises:
        CheckpointError: the folder is damaged, in codes, or another model's.
        ConfigError: its configuration is malformed or not implemented.
    """
    if declares_codes(folder):
        raise CheckpointError(
            f"the teacher {folder} is in codes itself; give the float model that the codes of "
            f"{student.folder.path} were made from"
        )
    plan = plan_load(open_folder(folder), QwenConfig.from_hf(folder))
    mine, others = (dataclasses.asdict(p.config) for p in (student, plan))
    differing = [
        f"{name} {others[name]!r:.60} there, {mine[name]!r:.60} here"
        for name in mine
        if name not in _NO_ARCHITECTURE and mine[name] != others[name]
    ]
    if differing:
        raise CheckpointError(
            f"the teacher {folder} is not the model that {student.folder.path} was made from: "
            f"{listed(differing)}; give that one"
        )
    return plan


def fold_teacher(model: CausalLM, teacher: CausalLM, report: Mapping[str, Any]) -> None:
    """Folds a teacher's matrices as those of the codes were; it computes the same as before.

    Args:
        model: in codes.
        teacher: float32.
        report: of the codes.
    """
    coded, config = tensors_in_codes(model), model.config
    for path, row in report["tensors"].items():
        fold = fold_of(path)
        if fold is None or row.get("input_scale") != fold.producer:
            continue
        before = np.asarray(at(teacher, fold.producer)[...])
        after = np.asarray(coded[fold.producer].dequantise(jnp.float32))
        factors = folded_factors(before, after, fold, coded[path].inputs, config)
        fold_weights(teacher, path, fold, factors, config)


def refuse_other_teacher(model: CausalLM, teacher: CausalLM) -> None:
    """Compares codes with a teacher's weights.

    Raises:
        CheckpointError: of most tensors they miss far more than codes of so many bits do.
    """
    coded = tensors_in_codes(model)
    beyond: dict[str, float] = {}
    for path, tensor in coded.items():
        missed, _ = judged(at(teacher, path)[...], start(tensor), format_of(tensor))
        if not missed <= MOST_MISSED[tensor.bits]:
            beyond[path] = float(missed)
    if 2 * len(beyond) > len(coded):
        worst = max(beyond, key=lambda path: beyond[path])
        raise CheckpointError(
            f"the codes do not stand for the teacher's weights: they miss more than codes of their "
            f"bits do in {len(beyond)} of {len(coded)} tensors, such as {beyond[worst]:.2f} of "
            f"{worst} (accepted is {MOST_MISSED[coded[worst].bits]}); give the float model that "
            "the codes were made from"
        )
