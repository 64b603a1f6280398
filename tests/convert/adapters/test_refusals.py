"""Tensors that cannot be merged are refused by name, all of them in one error."""

from __future__ import annotations

import re

import numpy as np
import pytest

from convert.adapters import load_adapter

BASE = "base_model.model.model."
HEAD = "base_model.model.lm_head."
Q = f"{BASE}layers.0.self_attn.q_proj."
EXPERTS = f"{BASE}layers.0.mlp.experts."
PLAIN = {"peft_type": "LORA", "r": 2, "lora_alpha": 4}


def ones(*shape):
    return np.ones(shape, np.float32)


def pair(module, rows, columns, rank=2):
    return {
        f"{module}lora_A.weight": ones(rank, columns),
        f"{module}lora_B.weight": ones(rows, rank),
    }


def kinds(message):
    return {kind: int(n) for kind, n in re.findall(r"^  (\S.*) \((\d+)\):$", message, re.M)}


@pytest.fixture(scope="session")
def dense(golden):
    return golden("qwen3_tokens").config


@pytest.fixture(scope="session")
def tied(golden):
    return golden("qwen3_tied_tokens").config


@pytest.fixture(scope="session")
def moe(golden):
    return golden("qwen3_moe").config


@pytest.fixture(scope="session")
def square(golden):
    return golden("qwen3_moe_square").config


@pytest.fixture(scope="session")
def hybrid(golden):
    return golden("qwen3_next").config


def test_every_fault_is_named_at_once(dense, refused):
    tensors = {
        **pair(Q, 16, 16),
        f"{BASE}layers.0.self_attn.k_proj.lora_A.weight": ones(2, 16),
        f"{BASE}layers.0.self_attn.v_proj.lora_B.weight": ones(8, 2),
        **pair(f"{BASE}layers.1.self_attn.q_proj.", 16, 16),
        **pair(f"{BASE}layers.0.self_attn.o_proj.", 16, 15),
        **pair(f"{BASE}layers.0.mlp.up_proj.", 20, 16, rank=3),
        f"{BASE}layers.0.mlp.down_proj.lora_magnitude_vector": ones(16),
        f"{BASE}layers.0.mlp.gate.weight": ones(4, 16),
        f"{BASE}norm.weight": ones(15),
        f"{Q}lora_A.default.weight": ones(2, 16),
        "base_model.model.model": ones(1),
        f"{HEAD}weight": np.ones((40, 16), np.int8),
    }
    message = refused(dense, tensors, use_dora=True, modules_to_save=["embed_tokens", "nothing"])
    assert kinds(message) == {
        "cannot be merged": 1,
        "not understood": 2,
        "dtype": 1,
        "duplicate": 1,
        "match no tensor of the model": 3,
        "misshapen": 4,
        "incomplete": 3,
    }
    assert "k_proj.lora_A.weight has no lora_B beside it" in message
    assert "v_proj.lora_B.weight has no lora_A beside it" in message
    assert "up_proj.lora_A.weight has shape [3, 16], expected [2, 16] (rank 2)" in message
    assert "modules_to_save names embed_tokens" in message


@pytest.mark.parametrize(
    "tensors",
    [
        {},
        pair("base_model.model.model.visual.blocks.0.attn.qkv.", 96, 32),
        pair("base_model.model.visual.blocks.0.attn.qkv.", 96, 32),
    ],
)
def test_adapters_that_match_nothing(dense, refused, tensors):
    assert kinds(refused(dense, tensors)) == {"no tensor of the text model": 1}


def test_adapter_of_another_model_names_its_keys(dense, refused):
    message = refused(dense, pair("base_model.model.transformer.h.0.attn.c_attn.", 48, 16))
    assert kinds(message) == {"match no tensor of the model": 2}
    message = refused(dense, pair(f"{BASE}mtp.layers.0.self_attn.q_proj.", 16, 16))
    assert kinds(message) == {"match no tensor of the model": 2}


def test_update_of_the_convolution(hybrid, refused):
    module = f"{BASE}layers.0.linear_attn.conv1d."
    tensors = {f"{module}lora_A.weight": ones(8, 4), f"{module}lora_B.weight": ones(1, 8)}
    assert kinds(refused(hybrid, tensors)) == {"cannot be merged": 1}


def test_embedding_factors_of_another_module(dense, refused):
    tensors = {f"{Q}lora_embedding_A": ones(2, 16), f"{Q}lora_embedding_B": ones(16, 2)}
    assert kinds(refused(dense, tensors)) == {"match no tensor of the model": 2}
    tensors = {f"{BASE}embed_tokens.lora_embedding_A": ones(2, 40)}
    assert "embed_tokens.lora_embedding_A has no lora_embedding_B" in refused(dense, tensors)


def test_resized_vocabulary(dense, refused):
    tensors = {**pair(Q, 16, 16), f"{BASE}embed_tokens.weight": ones(48, 16)}
    assert "embed_tokens.weight has shape [48, 16], expected [40, 16]" in refused(dense, tensors)


def test_rows_of_tokens(dense, refused):
    key = f"{BASE}embed_tokens.token_adapter.trainable_tokens_delta"
    given = {"trainable_token_indices": [5, 40]}
    assert "has 40, embed_tokens.weight has 40 rows" in refused(dense, {key: ones(2, 16)}, **given)


def test_rows_of_tokens_that_do_not_fit(dense, refused):
    key = f"{BASE}embed_tokens.token_adapter.trainable_tokens_delta"
    given = {"trainable_token_indices": {"embed_tokens": [5, 6]}}
    assert kinds(refused(dense, {key: ones(3, 16)}, **given)) == {"misshapen": 1}


@pytest.mark.parametrize("given", [{}, {"trainable_token_indices": {"lm_head": [5]}}])
def test_rows_of_tokens_without_numbers(dense, refused, given):
    key = f"{BASE}embed_tokens.token_adapter.trainable_tokens_delta"
    assert kinds(refused(dense, {key: ones(1, 16)}, **given)) == {"incomplete": 1}


def test_rows_of_tokens_and_an_update_together(dense, refused):
    tensors = {
        f"{BASE}embed_tokens.token_adapter.trainable_tokens_delta": ones(1, 16),
        f"{BASE}embed_tokens.lora_embedding_A": ones(2, 40),
        f"{BASE}embed_tokens.lora_embedding_B": ones(16, 2),
    }
    assert kinds(refused(dense, tensors, trainable_token_indices=[3])) == {"ambiguous": 1}


def fused(size, inner, outer):
    return {
        f"{EXPERTS}base_layer.lora_A.weight": ones(size, inner),
        f"{EXPERTS}base_layer.lora_B.weight": ones(outer, size),
    }


def test_fused_experts_of_other_shapes(moe, refused):
    message = refused(moe, fused(8, 16, 13))
    assert kinds(message) == {"misshapen": 1}
    assert "[8, 16] and [12, 8] for gate_up_proj (rank 2)" in message
    assert "[8, 6] and [16, 8] for down_proj (rank 2)" in message


def test_two_updates_of_one_fused_parameter(moe, refused):
    tensors = fused(8, 16, 12)
    tensors |= {key.replace("base_layer.", ""): value for key, value in tensors.items()}
    assert kinds(refused(moe, tensors, peft_version="0.21.2")) == {"ambiguous": 1}


@pytest.mark.parametrize("version", [None, "", "0.19.1.dev0@1234567", "next"])
def test_square_experts_of_an_unknown_release(square, refused, version):
    message = refused(square, fused(8, 16, 16), peft_version=version)
    assert kinds(message) == {"ambiguous": 1}
    assert "square" in message


def test_square_experts_beside_others_that_tell(square, write_adapter):
    base = fused(8, 16, 16)
    base[f"{EXPERTS}base_layer.lora_A.weight"] = np.arange(128, dtype=np.float32).reshape(8, 16)
    results = []
    for name, shapes in (("newer", (8, 16)), ("older", (16, 8))):
        tensors = {
            **base,
            f"{EXPERTS}lora_A.weight": ones(8, shapes[0]),
            f"{EXPERTS}lora_B.weight": ones(shapes[1], 8),
        }
        adapter = load_adapter(write_adapter(tensors, PLAIN, name), square)
        zeros = np.zeros((4, 16, 16), np.float32)
        results.append(adapter.apply("layers.0.mlp.experts.gate_up_proj", 0, zeros))
    np.testing.assert_array_equal(results[0], results[1].swapaxes(1, 2))
    assert not np.array_equal(*results)


def test_experts_updated_in_both_forms(moe, refused):
    tensors = fused(8, 16, 12) | pair(f"{EXPERTS}1.up_proj.", 6, 16)
    assert kinds(refused(moe, tensors)) == {"ambiguous": 1}


def test_projections_updated_in_both_forms(hybrid, refused):
    module = f"{BASE}layers.0.linear_attn."
    tensors = pair(f"{module}in_proj_ba.", 8, 16) | pair(f"{module}in_proj_a.", 4, 16)
    assert kinds(refused(hybrid, tensors)) == {"ambiguous": 1}


def embedding(value=1):
    return {
        f"{BASE}embed_tokens.lora_embedding_A": ones(2, 40) * value,
        f"{BASE}embed_tokens.lora_embedding_B": ones(16, 2),
    }


@pytest.mark.parametrize(
    ("tensors", "which"),
    [
        (embedding(), "one of the two only"),
        (pair(HEAD, 40, 16), "one of the two only"),
        (embedding(2) | pair(HEAD, 40, 16), "them differently"),
        ({f"{BASE}embed_tokens.weight": ones(40, 16)}, "one of the two only"),
        ({f"{HEAD}weight": ones(40, 16)}, "one of the two only"),
        (
            {f"{HEAD}weight": ones(40, 16), f"{BASE}embed_tokens.weight": 2 * ones(40, 16)},
            "them differently",
        ),
        ({f"{HEAD}weight": ones(40, 16)} | embedding(), "them differently"),
    ],
)
def test_one_side_of_tied_embeddings(tied, refused, tensors, which):
    message = refused(tied, tensors | pair(Q, 16, 16))
    assert kinds(message) == {"cannot be merged": 1}
    assert which in message
    assert "tie_word_embeddings false" in message


def test_one_scale_of_tied_embeddings(tied, refused):
    message = refused(tied, embedding() | pair(HEAD, 40, 16), alpha_pattern={"lm_head": 8})
    assert "them differently" in message


def test_names_that_cannot_be_printed(dense, refused):
    message = refused(dense, {"base_model.model.\x1b[31m\nx.lora_A.weight": ones(1, 1)})
    assert "\x1b" not in message
