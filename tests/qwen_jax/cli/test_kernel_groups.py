"""Where the time of a step goes, from launches as an H200 shows them."""

from __future__ import annotations

import pytest

from qwen_jax.cli.kernel_groups import (
    ATTENTION,
    DELTA_RULE,
    DENSE,
    EXPERTS,
    HEAD,
    NORMS,
    OTHER,
    ROUTER,
    Event,
    groups_of,
)
from qwen_jax.cli.kernel_profile import split

# Name, group, and microseconds: a delta layer, an attention layer, the head and what is drawn.
STEP = (
    ("gather_fusion", OTHER, 1),
    ("rms_norm", NORMS, 1),
    ("dequant_matmul_few_rows", DENSE, 8),
    ("delta_rule_decode", DELTA_RULE, 4),
    ("input_reduce_fusion_2", NORMS, 1),
    ("dequant_matmul_few_rows__1", DENSE, 5),
    ("rms_norm__1", NORMS, 1),
    ("router_logits", ROUTER, 2),
    ("router_top_k", ROUTER, 2),
    ("expert_dispatch_gate_up", EXPERTS, 7),
    ("expert_dispatch_down", EXPERTS, 4),
    ("rms_norm", NORMS, 1),
    ("gemm_fusion_dot_general_4", DENSE, 6),
    ("attention_inputs", ATTENTION, 2),
    ("block_attention", ATTENTION, 6),
    ("block_attention_combine", ATTENTION, 2),
    ("loop_multiply_fusion", ATTENTION, 1),
    ("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", DENSE, 3),
    ("rms_norm__1", NORMS, 1),
    ("gemm_fusion_dot_9", ROUTER, 2),
    ("router_top_k", ROUTER, 2),
    ("expert_dispatch_gate_up", EXPERTS, 7),
    ("expert_dispatch_down", EXPERTS, 4),
    ("rms_norm", NORMS, 1),
    ("dequant_matmul_few_rows__1", HEAD, 90),
    ("input_reduce_fusion", OTHER, 3),
    ("MemcpyD2D", OTHER, 1),
)


def events(steps: int) -> list[Event]:
    found, time = [], 0.0
    for _ in range(steps):
        for name, _, microseconds in STEP:
            found.append(Event(name, time, 1000.0 * microseconds))
            time += 1000 * microseconds + 100
    return found


@pytest.mark.parametrize("steps", [1, 3])
def test_each_launch_has_its_part_of_the_model(steps):
    found = groups_of(events(steps), steps)
    assert found == [group for _, group, _ in STEP] * steps


def test_experts_that_are_made_in_bfloat16_are_experts():
    names = (
        "dequant_matmul_unpack",
        "nvjet_a",
        "dequant_matmul_unpack__1",
        "expert_dispatch_gated",
        "dequant_matmul_unpack__2",
        "expert_dispatch_down",
        "gemm_fusion_dot_2",
    )
    groups = groups_of([Event(name, 0.0, 1.0) for name in names], 1)
    assert groups == [DENSE, DENSE, EXPERTS, EXPERTS, EXPERTS, EXPERTS, HEAD]


def test_what_runs_beside_our_kernels_is_not_theirs():
    """A product between a router's two launches, and codes made in front of those that stream."""
    names = (
        "router_parts",
        "gemm_fusion_dot",
        "router_top_k",
        "dequant_matmul_unpack",
        "expert_dispatch_gated_mosaic_gpu_kernel",
        "gemm_fusion_dot_2",
    )
    groups = groups_of([Event(name, 0.0, 1.0) for name in names], 1)
    assert groups == [ROUTER, DENSE, ROUTER, DENSE, EXPERTS, HEAD]


@pytest.mark.parametrize("steps", [1, 4])
def test_the_head_behind_products_of_a_shared_expert(steps):
    """They wait for no router, so that each step has them elsewhere among its launches."""
    layer = (
        ("rms_norm", NORMS),
        ("router_parts", ROUTER),
        ("router_top_k", ROUTER),
        ("expert_dispatch_order", EXPERTS),
        ("expert_dispatch_gate_up", EXPERTS),
        ("expert_dispatch_down", EXPERTS),
    )
    product = ("dequant_matmul_some_rows", DENSE)
    launches = []
    for step in range(steps):
        for number in range(2):
            mine = list(layer)
            # Behind the norm; the second behind the first, and before the sum.
            mine.insert(1 + (step + number) % 3, product)
            mine.insert(3 + (2 * step + number) % 5, product)
            launches += [product, *mine, ("expert_dispatch_sum", EXPERTS)]
        launches += [("rms_norm", NORMS), ("dequant_matmul_some_rows__1", HEAD)]
        launches += [("input_reduce_fusion", OTHER)]
    found = groups_of([Event(n, float(i), 5.0) for i, (n, _) in enumerate(launches)], steps)
    assert found == [group for _, group in launches]


def test_heads_are_not_guessed():
    odd = [*events(2), Event("gemm_fusion_dot", 0.0, 1.0)]
    assert HEAD not in groups_of(odd, 2)


def test_parts_and_gaps_make_the_step():
    part = split(events(4), 4, 200e-6)
    wanted: dict[str, float] = {}
    for _, group, microseconds in STEP:
        wanted[group] = wanted.get(group, 0) + microseconds * 1e-6
    assert part["groups"] == pytest.approx(wanted)
    assert part["gaps"] == pytest.approx(200e-6 - sum(wanted.values()))
    assert part["launches"] == len(STEP)
    first, second = part["kernels"][:2]
    assert (first["name"], first["group"]) == ("dequant_matmul_few_rows__1", HEAD)
    assert first["seconds"] == pytest.approx(90e-6)
    # A kernel that two layers run, and one that serves as head and as a projection too.
    assert second["launches"] == 2 and second["seconds"] == pytest.approx(14e-6)
    shared = [each for each in part["kernels"] if each["name"] == first["name"]]
    assert [each["group"] for each in shared] == [HEAD, DENSE]


def test_a_prompt_in_chunks_has_a_head_each():
    part = split(events(3), 1, 1e-3, passes=3)
    assert part["groups"][HEAD] == pytest.approx(3 * 90e-6)
    assert part["launches"] == 3 * len(STEP)


def test_launches_at_the_same_time_share_it():
    names = ("router_parts", "expert_dispatch_down", "rms_norm", "router_top_k", "rms_norm__1")
    times = ((0, 6), (2, 2), (3, 5), (10, 0), (11, 1))
    # 0-2 router; 2-3 with experts; 3-4 with norm too; 4-6 router and norm; 6-8 norm; 11-12 norm.
    router, experts, norm = 2 + 1 / 2 + 1 / 3 + 1, 1 / 2 + 1 / 3, 1 / 3 + 1 + 2 + 1
    found = [Event(name, *map(float, time)) for name, time in zip(names, times, strict=True)]
    part = split(found, 1, 12e-9)
    assert part["groups"][ROUTER] == pytest.approx(router * 1e-9)
    assert part["groups"][EXPERTS] == pytest.approx(experts * 1e-9)
    assert part["groups"][NORMS] == pytest.approx(norm * 1e-9)
    assert part["gaps"] == pytest.approx(3e-9)
    [longest] = [each for each in part["kernels"] if each["name"] == "router_parts"]
    assert longest["median"] == pytest.approx(6e-9)
    assert longest["seconds"] == pytest.approx(router * 1e-9)


def test_without_launches_all_is_gaps():
    part = split([], 4, 1.0)
    assert part["gaps"] == 1.0 and part["kernels"] == []
