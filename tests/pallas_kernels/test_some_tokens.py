"""Tokens that share experts share their tiles: the sum against float64, and which calls do."""

from __future__ import annotations

import dataclasses
import functools
import re

import jax.numpy as jnp
import pytest

from pallas_kernels import tuning
from pallas_kernels._compat import H200, lower_for_cuda, targeting
from pallas_kernels.dequant_matmul.config import SomeRows
from pallas_kernels.expert_dispatch import triton
from pallas_kernels.expert_dispatch.config import SHARING_TOKENS, Cut, FewTokens, SomeTokens
from pallas_kernels.expert_dispatch.specs import SPECS, Spec
from pallas_kernels.testing import interpreted
from tests.pallas_kernels.expert_calls import check_whole, small

# Of most experts more slots than a row holds, of one none; in three tiles or more, none full.
SOME = SomeTokens(
    SomeRows(4, 32, blocks=2), SomeRows(4, 32), SomeRows(8, 32), SomeRows(16, 32, blocks=2)
)
FEW = FewTokens(Cut(), Cut())
TOGETHER = {
    "3 and 4 bits": small(3, 4, tokens=19, group_size=128, width=420, x="bfloat16"),
    "4 and 3 bits, zero": small(4, 3, tokens=11, zero=True, group_size=32, width=420, x="bfloat16"),
    "shared 3 and 8": small(
        3, 3, tokens=11, width=420, x="bfloat16", shared_bits=3, shared_down_bits=8
    ),
    "shared 8 and 3": small(3, 3, tokens=9, width=420, x="bfloat16", shared_down_bits=3),
    "3 and 8 bits, alone": small(3, 8, tokens=11, shared_hidden=0, hidden=128, width=420),
}


@pytest.mark.parametrize("name", TOGETHER)
def test_tokens_that_share_experts(name):
    # Strengths do not depend on the format.
    with interpreted():
        check_whole(TOGETHER[name], SOME, given=name == "3 and 4 bits")


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("name", TOGETHER)
def test_tokens_that_share_experts_on_a_gpu(name, bits):
    check_whole(dataclasses.replace(TOGETHER[name], shared_bits=bits), SOME)


def test_tokens_that_share_experts_lower_for_cuda():
    """The order, both products, and their sum; nothing is left for launches of XLA."""
    run = functools.partial(triton.expert_dispatch, **SPECS["32 tokens"].settings())
    text = lower_for_cuda(run, *SPECS["32 tokens"].arguments())
    assert text.count("xla.gpu.triton") == 4
    assert set(re.findall(r"stablehlo\.(\w+)", text)) == {"custom_call", "reshape"}


@pytest.mark.parametrize(
    ("spec", "kind", "abreast"),
    [
        (Spec(1), FewTokens, False),
        (Spec(8), FewTokens, True),
        (Spec(8, shared_bits=16), FewTokens, False),
        (Spec(12), SomeTokens, None),
        (Spec(64, down_bits=8, shared_hidden=0), SomeTokens, None),
        (Spec(64, bits=4, group_size=32), SomeTokens, None),
        (Spec(64, down_bits=4, group_size=32), SomeTokens, None),
        (Spec(64, bits=16), FewTokens, False),
        (Spec(64, shared_bits=16), FewTokens, False),
    ],
)
def test_which_tokens_share_tiles(spec, kind, abreast):
    x, ids, _, up, below, shared = spec.arguments()
    with targeting(H200):
        config = triton.chosen(x, ids, up, below, shared, jnp.bfloat16)
    assert type(config) is kind
    assert getattr(config, "abreast", None) is abreast
    if kind is SomeTokens:
        assert config.gate_up.rows == config.down.rows
        # Tensor cores take eight columns or more; of two blocks of 32, sums leave the registers.
        for cut, weight in ((config.gate_up, up), (config.down, below)):
            copies = 128 // weight.group_size if weight.bits == 3 else 1
            assert 8 <= cut.rows * copies <= 32 // cut.blocks


def test_what_was_measured_counts_for_the_same_shared_expert_alone():
    """Tensor cores, and inputs abreast, are for codes."""
    several = [Spec(8, shared_bits=bits) for bits in (3, 8, 16)] + [Spec(8, shared_hidden=0)]
    with targeting(H200), tuning.listening() as heard:
        for spec in several:
            x, ids, _, up, below, shared = spec.arguments()
            triton.chosen(x, ids, up, below, shared, jnp.bfloat16)
    assert len(heard) == len(several)


@pytest.mark.parametrize(
    ("spec", "kinds"),
    [
        (Spec(1), {FewTokens}),
        (Spec(2), {FewTokens, SomeTokens}),
        (Spec(SHARING_TOKENS - 1, bits=4), {FewTokens, SomeTokens}),
        (Spec(SHARING_TOKENS, shared_hidden=0), {FewTokens, SomeTokens}),
        (Spec(64), {FewTokens, SomeTokens}),
        (Spec(SHARING_TOKENS, down_bits=16), {FewTokens}),
        (Spec(SHARING_TOKENS, shared_bits=16), {FewTokens}),
        (Spec(SHARING_TOKENS, bits=16, down_bits=16, inner="float32"), {FewTokens}),
    ],
)
def test_either_way_may_be_tried_where_both_fit(monkeypatch, spec, kinds):
    """And counts if it was measured: of one key, all calls can be cut both ways, or none."""
    x, ids, _, up, below, shared = spec.arguments()
    choose = functools.partial(triton.chosen, x, ids, up, below, shared, jnp.dtype(spec.inner))
    with targeting(H200):
        with tuning.listening() as heard:
            choose()
        [((kernel, key), decision)] = heard.items()
        offered = [decision.heuristic, *decision.others]
        assert {type(config) for config in offered} == kinds
        for config in (offered[-1], FEW, SOME):
            entry = {"config": tuning.as_fields(config), "file": "a file"}
            monkeypatch.setattr(tuning, "table", lambda kind, e=entry: {kernel: {key: e}})
            if type(config) in kinds:
                assert choose() == config
            else:
                with pytest.raises(tuning.TuningError, match="accepted are the fields of FewTok"):
                    choose()
