"""Which part of the model each kernel of a profile belongs to.

Our kernels say it by their names. XLA's have names such as `loop_convert_fusion_3`, and inside a
CUDA graph a profile knows nothing else of them: those go by what runs just before or behind them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

ATTENTION, DELTA_RULE, EXPERTS, ROUTER = "attention", "delta rule", "experts", "router"
DENSE, NORMS, HEAD, OTHER = "dense products", "norms", "head", "sampling and other"
GROUPS = (ATTENTION, DELTA_RULE, EXPERTS, ROUTER, DENSE, NORMS, HEAD, OTHER)

# The first pattern that a kernel's name holds says its group.
NAMES = (
    (r"^(attention_inputs|block_attention|flash_attention)", ATTENTION),
    (r"cudnn|fmha|flash_fprop", ATTENTION),
    (r"^delta_rule", DELTA_RULE),
    (r"^expert_dispatch", EXPERTS),
    (r"^router", ROUTER),
    (r"^rms_norm", NORMS),
    (r"^dequant_matmul", DENSE),
    (r"gemm|gemv|nvjet|cutlass|cublas|dot", DENSE),
)
# Both launches of a router.
LOGITS, TOP_K = r"^router_(logits|parts)", r"^router_top_k"
# (name, name of the kernel behind it, group): experts' matrices that are made in bfloat16 first,
# and router logits that are a product of XLA's, where none of our launches makes them.
BEFORE = (
    (r"^dequant_matmul_unpack", r"^expert_dispatch_(gated|down)(__\d+)?$", EXPERTS),
    (r"gemm|gemv|nvjet|cutlass|fusion", TOP_K, ROUTER),
)
# (name, group of the kernel before it, group): the norm under the gate that XLA joins with the
# gate's projection, and the gate of attention.
AFTER = (
    (r"fusion", DELTA_RULE, NORMS),
    (r"fusion", ATTENTION, ATTENTION),
)


class Event(NamedTuple):
    """One launch: kernel's name, and when it began and how long it ran in nanoseconds."""

    name: str
    start: float
    duration: float


def groups_of(events: Sequence[Event], passes: int) -> list[str]:
    """The group of each launch.

    Args:
        events: launches of a program in the order of their start.
        passes: how often the model ran; the last dense product of each pass is the head. Where
            passes do not have the same number of products, there is no telling, and heads stay
            among them.
    """
    groups: list[str] = []
    made = False
    for index, event in enumerate(events):
        behind = events[index + 1].name if index + 1 < len(events) else ""
        made = bool(re.search(LOGITS, event.name)) or (made and not re.search(TOP_K, event.name))
        rules = [rule for rule in BEFORE if not (made and rule[2] == ROUTER)]
        groups.append(_group(event.name, groups[-1] if groups else "", behind, rules))
    dense = [index for index, group in enumerate(groups) if group == DENSE]
    if dense and len(dense) % passes == 0:
        each = len(dense) // passes
        for index in dense[each - 1 :: each]:
            groups[index] = HEAD
    return groups


def _group(name: str, before: str, behind: str, rules: Iterable[tuple[str, str, str]]) -> str:
    for pattern, next_pattern, group in rules:
        if re.search(pattern, name) and re.search(next_pattern, behind):
            return group
    for pattern, group in NAMES:
        if re.search(pattern, name):
            return group
    for pattern, previous, group in AFTER:
        if re.search(pattern, name) and before == previous:
            return group
    return OTHER
