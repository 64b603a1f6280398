"""Our own codes read as bfloat16: values, runs of rows, and what is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from convert.logical import open_logical
from convert.source import open_source
from pallas_kernels.dequant_matmul.layout import pack
from qwen_jax.cli import main
from qwen_jax.errors import CheckpointError
from tests.qwen_jax.coded_folder import arrays_of, coded_model, scheme_from, write_coded

UP = "model.layers.0.mlp.experts.gate_up_proj"
DOWN = "model.layers.0.mlp.experts.down_proj"
QUERY = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def model():
    model = coded_model()
    query, down = (
        model.layers[0].self_attn.q_proj.weight,
        model.layers[0].mlp.experts.down_proj,
    )
    factor = jnp.linspace(0.5, 2, 40, dtype=jnp.float32)
    query.set_value(dataclasses.replace(query.get_value(), input_scale=factor))
    factor = jnp.arange(1, 1 + 3 * 36, dtype=jnp.float32).reshape(3, 36) / 32  # exact products
    down.set_value(dataclasses.replace(down.get_value(), input_scale=factor))
    return model


@pytest.fixture
def known(model):
    """Arrays of a folder whose values follow from a few numbers, and its scheme."""
    arrays = arrays_of(model)
    codes = np.arange(3 * 40 * 36).reshape(3, 40, 36) % 16
    arrays[f"{DOWN}.codes"] = pack(codes.astype(np.uint8), 4)
    scale = np.broadcast_to(np.array([0.5, -2], np.float32), (3, 40, 2))
    arrays[f"{DOWN}.scale"] = scale.astype(ml_dtypes.bfloat16)
    zero = np.broadcast_to(np.array([3, 0], np.float32), (3, 40, 2))
    arrays[f"{DOWN}.zero"] = zero.astype(ml_dtypes.bfloat16)
    # Inputs from 32 on are the second group.
    wide = np.where(np.arange(36) < 32, (codes - 3.0) * 0.5, codes * -2.0)
    wide = wide * arrays[f"{DOWN}.input_scale"][:, None, :].astype(np.float64)
    return arrays, scheme_from(model), wide.astype(np.float32).astype(ml_dtypes.bfloat16)


def test_values_are_what_the_codes_stand_for(known, tmp_path):
    arrays, scheme, wanted = known
    folder = open_logical(write_coded(tmp_path / "codes", arrays, scheme))

    assert folder.tensors[DOWN].shape == (3, 40, 36)
    assert folder.tensors[DOWN].dtype == "BF16"
    np.testing.assert_array_equal(folder.read(DOWN), wanted)
    np.testing.assert_array_equal(folder.read(DOWN, slice(1, 3)), wanted[1:])
    whole = folder.read(QUERY)
    np.testing.assert_array_equal(folder.read(QUERY, slice(5, 9)), whole[5:9])
    assert whole.shape == (32, 40)
    assert folder.nbytes == sum(array.nbytes for array in arrays.values())
    assert not any(".codes" in key or ".scale" in key for key in folder.tensors)


def test_an_export_is_a_plain_folder_of_the_same_numbers(known, tmp_path, capsys):
    arrays, scheme, wanted = known
    source = write_coded(tmp_path / "codes", arrays, scheme)

    assert main(["export", str(source), str(tmp_path / "plain")]) == 0

    plain = open_source(tmp_path / "plain")
    assert "quantization_config" not in plain.raw_config
    np.testing.assert_array_equal(plain.folder.read(DOWN), wanted)
    capsys.readouterr()
    main(["diff", str(source), str(tmp_path / "plain")])
    assert "14 of 14 tensors in both are the same bit for bit" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda a: a.pop(f"{DOWN}.zero"), f"{DOWN}.zero (quantization_config has it in codes)"),
        (lambda a: a.pop(f"{UP}.codes"), "gate_up_proj is not in the folder"),
        (
            lambda a: a.update({f"{UP}.scale": a[f"{UP}.scale"][:, :1].copy()}),
            f"{UP}.scale has shape [3, 1, 2], expected [3, 72, 2]",
        ),
    ],
)
def test_parts_that_do_not_fit_are_refused(known, tmp_path, change, words):
    arrays, scheme, _ = known
    change(arrays)
    folder = write_coded(tmp_path / "codes", arrays, scheme)
    with pytest.raises(CheckpointError) as error:
        open_logical(folder)
    assert words in str(error.value)


def test_scales_that_make_no_sense_are_refused_when_read(known, tmp_path):
    arrays, scheme, _ = known
    arrays[f"{UP}.scale"] = np.zeros_like(arrays[f"{UP}.scale"])
    folder = open_logical(write_coded(tmp_path / "codes", arrays, scheme))
    with pytest.raises(CheckpointError, match=f"{UP}.scale are zero, NaN or infinite"):
        folder.read(UP)


def test_one_more_tensor_is_refused(known, tmp_path: Path):
    arrays, scheme, _ = known
    arrays[f"{UP}.zero"] = np.zeros(3, np.float32)
    with pytest.raises(CheckpointError, match=f"{UP}.zero"):
        open_source(write_coded(tmp_path / "codes", arrays, scheme))
