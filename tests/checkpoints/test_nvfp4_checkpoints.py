"""Checkpoints with weights in NVFP4, in both layouts: what they mean, and that saving gives them back."""

import fnmatch
import json
import re
import shutil
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from damage import edit_config, edit_stored, read_all

from hybridjax.checkpoints import load_model, save_pretrained
from hybridjax.checkpoints.nvfp4 import FORMATS, stored_tensors, weights_in_nvfp4
from hybridjax.checkpoints.quantization_config import quantization_config
from hybridjax.errors import CheckpointError
from hybridjax.layers.quantized import NVFP4Experts, NVFP4Weight, SplitWeight, arrange
from hybridjax.ops.dispatch import assume
from hybridjax.quantization import dequantize, quantize

FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
LINEAR = re.compile(r".*layers\.\d+\.(mlp|self_attn|linear_attn)\.\w+proj\w*\.weight|.*\.o_gate\.weight")
EXPERT = re.compile(r".*layers\.\d+\.mlp\.experts\.\d+\.\w+_proj\.weight")
INPUT = 0.004


def rounded(
    directory: Path, layout: str = "modelopt", *, only=LINEAR, skip: str = "", calibrated: bool = True
) -> dict[str, np.ndarray]:
    """Brings weights of a checkpoint into NVFP4; returns the float32 values that they then mean."""
    meant: dict[str, np.ndarray] = {}
    number = 0

    def change(tensors: dict[str, np.ndarray]) -> None:
        nonlocal number
        for name in [name for name in tensors if only.fullmatch(name)]:
            if tensors[name].shape[1] % 16 or (skip and fnmatch.fnmatch(name, skip)):
                continue
            number += 1
            weight = quantize(jnp.asarray(tensors.pop(name), jnp.float32), "mse")
            meant[name] = np.asarray(dequantize(weight))
            scale = INPUT * number if calibrated else None
            tensors.update(stored_tensors(name, weight, scale, layout))

    edit_stored(directory, change)
    stated, apart = quantization_config(layout, ["lm_head"], calibrated)
    edit_config(directory, quantization_config=stated)
    if apart is not None:
        (directory / "hf_quant_config.json").write_text(json.dumps(apart))
    assert meant
    return meant


def unrounded(source: Path, target: Path, meant: dict[str, np.ndarray]) -> Path:
    """The checkpoint with these values instead."""
    target.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(source / name, target / name)
    edit_stored(target, lambda tensors: tensors.update(meant))
    return target


def same(name: str, got: np.ndarray, want: np.ndarray) -> None:
    assert (got.dtype, got.shape) == (want.dtype, want.shape), name
    if name.endswith("_global_scale"):  # the reciprocal of a reciprocal
        np.testing.assert_array_max_ulp(got, want, 1)
    else:
        assert got.tobytes() == want.tobytes(), name


def logits(directory: Path, length: int = 70) -> np.ndarray:
    model = load_model(directory, "float32")
    ids = np.random.default_rng(0).integers(5, 90, (1, length))
    return np.asarray(model(jnp.asarray(ids, jnp.int32)))


@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize("calibrated", [True, False])
def test_a_model_computes_what_its_rounded_weights_say(tmp_path, golden, layout, calibrated):
    plain = tmp_path / "plain"
    shutil.copytree(golden, plain)
    meant = rounded(golden, layout, calibrated=calibrated)
    got, want = logits(golden), logits(unrounded(plain, tmp_path / "dense", meant))
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-5 * np.abs(want).max())
    assert np.abs(want - logits(plain)).max() > 1e-3 * np.abs(want).max()


@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize("calibrated", [True, False])
def test_saving_gives_back_every_tensor(tmp_path, golden, layout, calibrated):
    rounded(golden, layout, calibrated=calibrated)
    before = read_all(golden / "model.safetensors")
    model = load_model(golden, "float32")
    if calibrated:
        # As an engine does on a GPU.
        with assume("sm_90"):
            assert arrange(model) > 0
    save_pretrained(model, tmp_path / "again")
    after = read_all(tmp_path / "again/model.safetensors")
    assert before.keys() == after.keys()
    for name, value in before.items():
        same(name, after[name], value)
    stated = json.loads((tmp_path / "again/config.json").read_text())["quantization_config"]
    assert stated["quant_method"] == layout
    assert (tmp_path / "again/hf_quant_config.json").exists() == (layout == "modelopt")
    np.testing.assert_array_equal(logits(tmp_path / "again"), logits(golden))


def test_one_layout_becomes_the_other(tmp_path, golden):
    rounded(golden, "modelopt")
    model = load_model(golden, "float32")
    model.nvfp4_layout = "compressed-tensors"
    save_pretrained(model, tmp_path / "other")
    names = read_all(tmp_path / "other/model.safetensors").keys()
    assert any(name.endswith("weight_packed") for name in names)
    assert not any(name.endswith("weight_scale_2") for name in names)
    np.testing.assert_allclose(logits(tmp_path / "other"), logits(golden), rtol=0, atol=1e-5)


def test_projections_of_a_fused_matrix_keep_their_scales_and_may_be_dense(tmp_path, golden):
    plain = tmp_path / "plain"
    shutil.copytree(golden, plain)
    meant = rounded(golden, skip="*k_proj*")
    model = load_model(golden, "float32")
    split = model.layers[0].mixer.in_proj.weight
    assert isinstance(split, SplitWeight)
    assert [isinstance(part, NVFP4Weight) for part in split.parts][:3] == [True, False, True]
    stored = read_all(golden / "model.safetensors")
    part = split.parts[0]
    assert set(np.asarray(part.global_scale[...]).tolist()) == {
        float(stored["model.layers.0.self_attn.q_proj.weight_scale_2"])
    }
    fused = model.layers[0].mlp.gate_up.weight
    scales = [float(stored[f"model.layers.0.mlp.{name}_proj.weight_scale_2"]) for name in ("gate", "up")]
    assert scales[0] != scales[1]
    half = fused.shape[0] // 2
    np.testing.assert_array_equal(fused.global_scale[...], np.repeat(np.float32(scales), half))
    inputs = [float(stored[f"model.layers.0.mlp.{name}_proj.input_scale"]) for name in ("gate", "up")]
    np.testing.assert_array_equal(fused.input_scale[...], np.float32(inputs))
    got, want = logits(golden), logits(unrounded(plain, tmp_path / "dense", meant))
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-5 * np.abs(want).max())
    save_pretrained(model, tmp_path / "again")
    for name, value in read_all(tmp_path / "again/model.safetensors").items():
        same(name, value, stored[name])


def apart(directory: Path) -> None:
    """Stores fused experts one by one."""

    def change(tensors: dict[str, np.ndarray]) -> None:
        for name in [name for name in tensors if name.endswith("experts.gate_up_proj")]:
            stem = name.removesuffix("gate_up_proj")
            both, down = tensors.pop(name), tensors.pop(stem + "down_proj")
            for e in range(len(both)):
                gate, up = np.split(both[e], 2)
                tensors[f"{stem}{e}.gate_proj.weight"] = gate
                tensors[f"{stem}{e}.up_proj.weight"] = up
                tensors[f"{stem}{e}.down_proj.weight"] = down[e]

    edit_stored(directory, change)


@pytest.mark.parametrize("layout", FORMATS)
def test_experts_are_stored_one_by_one(tmp_path, qwen, layout):
    directory = qwen("text_small")
    apart(directory)
    plain = tmp_path / "plain"
    shutil.copytree(directory, plain)
    meant = rounded(directory, layout, only=EXPERT)
    model = load_model(directory, "float32")
    assert {type(node) for node in weights_in_nvfp4(model)} == {NVFP4Experts}
    got, want = logits(directory), logits(unrounded(plain, tmp_path / "dense", meant))
    np.testing.assert_allclose(got, want, rtol=0, atol=5e-5 * np.abs(want).max())
    before = read_all(directory / "model.safetensors")
    save_pretrained(model, tmp_path / "again")
    after = read_all(tmp_path / "again/model.safetensors")
    assert before.keys() == after.keys()
    for name, value in before.items():
        same(name, after[name], value)


def test_mixed_precision_as_released(tmp_path, qwen):
    """Experts in NVFP4, the table in FP8, MTP's experts in FP8 by blocks (qwen4_exp 2.4)."""
    directory = qwen("text_mtp")
    apart(directory)
    plain = tmp_path / "plain"
    shutil.copytree(directory, plain)
    meant = rounded(directory, only=re.compile(r"model\..*experts\.\d+\.\w+_proj\.weight"))

    def eight_bits(tensors: dict[str, np.ndarray]) -> None:
        for name in [
            name for name in tensors if re.fullmatch(r"mtp\..*experts\.\d+\.\w+_proj\.weight", name)
        ]:
            scale = np.full((1, 1), np.abs(tensors[name]).max() / 448, np.float32)
            tensors[name] = (tensors[name] / scale).astype(FLOAT8)
            tensors[name + "_scale_inv"] = scale
            meant[name] = tensors[name].astype(np.float32) * scale
        table = [name for name in tensors if "ngram_embedding.shard" in name]
        scale = np.array([0.01], ml_dtypes.bfloat16)
        for name in table:
            tensors[name] = (tensors[name] / np.float32(scale)).astype(FLOAT8)
            meant[name] = (tensors[name].astype(scale.dtype) * scale).astype(np.float32)  # as released
        if table:
            tensors[table[0].rpartition("shard")[0] + "weight_scale"] = scale

    edit_stored(directory, eight_bits)
    stated = {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {
            "model.layers.0.mlp.experts": {"quant_algo": "NVFP4", "group_size": 16},
            "mtp.layers.0.mlp.experts": {"quant_algo": "FP8_PB_WO"},
        },
    }
    edit_config(directory, quantization_config=stated)
    (directory / "hf_quant_config.json").unlink()
    got, want = logits(directory), logits(unrounded(plain, tmp_path / "dense", meant))
    np.testing.assert_allclose(got, want, rtol=0, atol=5e-5 * np.abs(want).max())


def test_matrices_in_fp8_with_one_scale_are_decoded(tmp_path, golden):
    """ModelOpt's mix of NVFP4 and FP8, whose calibrated inputs we have no use for."""
    plain = tmp_path / "plain"
    shutil.copytree(golden, plain)
    meant = rounded(golden, skip="*o_proj*")

    def eight_bits(tensors: dict[str, np.ndarray]) -> None:
        for name in [name for name in tensors if name.endswith("o_proj.weight")]:
            scale = np.float32(np.abs(tensors[name]).max() / 448)
            tensors[name] = (tensors[name] / scale).astype(FLOAT8)
            tensors[name + "_scale"] = np.array(scale)
            tensors[name.removesuffix("weight") + "input_scale"] = np.array(0.01, np.float32)
            meant[name] = tensors[name].astype(np.float32) * scale

    edit_stored(golden, eight_bits)
    got, want = logits(golden), logits(unrounded(plain, tmp_path / "dense", meant))
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-5 * np.abs(want).max())
    save_pretrained(load_model(golden, "float32"), tmp_path / "again")
    np.testing.assert_array_equal(logits(tmp_path / "again"), got)


def damaged(name: str, value) -> object:
    def change(tensors: dict[str, np.ndarray]) -> None:
        stored = tensors[name]
        if value is None:
            del tensors[name]
        elif stored.dtype == FLOAT8:
            stored.view(np.uint8).reshape(-1)[3] = value
        else:
            tensors[name] = np.full(stored.shape, value, np.float32)

    return change


UP = "model.layers.1.mlp.up_proj."
DAMAGE = [
    (UP + "weight_scale", 0x7F, "weight_scale: a block scale is NaN or below 0"),
    (UP + "weight_scale", 0xB0, "weight_scale: a block scale is NaN or below 0"),
    (UP + "weight_scale_2", np.nan, "weight_scale_2: the scale is nan; it must be finite"),
    (UP + "weight_scale_2", -1.0, "weight_scale_2: the scale is -1.0; it must be finite"),
    (UP + "weight_scale_2", 0.0, "weight_scale_2: the scale is 0.0; it must be finite"),
    (UP + "weight_scale_2", 1e-42, "weight_scale_2: the scale is 1.0.*e-42; it must be finite"),
    (UP + "input_scale", np.inf, "input_scale: the scale is inf; it must be finite"),
    (UP + "input_scale", None, "up_proj.input_scale is missing, though .*gate_proj.input_scale"),
    (UP + "weight_scale", None, "up_proj.weight_scale .* is missing"),
    (UP + "weight", None, "up_proj.weight .* is missing"),
    (UP + "weight_scale_2", None, "up_proj.weight in .* has"),
]


@pytest.mark.parametrize(("name", "value", "problem"), DAMAGE, ids=[f"{n[-14:]} {v}" for n, v, _ in DAMAGE])
def test_damage_is_named(golden, name, value, problem):
    rounded(golden)
    edit_stored(golden, damaged(name, value))
    with pytest.raises(CheckpointError, match=problem):
        load_model(golden, "float32")


STATED = [
    ({"quant_method": "awq"}, "quant_method is 'awq'; supported"),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, "quant_algo is 'NVFP4_AWQ'; supported"),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, "group_size is 32"),
    ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "config_groups is None"),
    (
        {"quant_method": "compressed-tensors", "config_groups": {"a": {"format": "pack-quantized"}}},
        "config_groups.a: format 'pack-quantized' is not supported",
    ),
    (
        {
            "quant_method": "compressed-tensors",
            "format": "nvfp4-pack-quantized",
            "config_groups": {"a": {"weights": {"group_size": 32}}},
        },
        "config_groups.a.weights.group_size is 32",
    ),
    (
        {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {"x": {"quant_algo": "INT4_AWQ"}},
        },
        "quantized_layers.x.quant_algo is 'INT4_AWQ'; supported",
    ),
    ("nvfp4", "quantization_config is 'nvfp4', not an object"),
    ({"quant_method": ["modelopt"]}, "quant_method is ['modelopt']; supported"),
    ({"quant_method": "modelopt", "quant_algo": ["NVFP4"]}, "quant_algo is ['NVFP4']; supported"),
    (
        {"quant_algo": "NVFP4", "quantized_layers": {"a": "NVFP4"}},
        "quantized_layers.a is 'NVFP4'; it must be",
    ),
    (
        {"quant_algo": "NVFP4", "quantized_layers": {"a": {"quant_algo": [1]}}},
        "quantized_layers.a.quant_algo is [1]",
    ),
    ({"quant_method": "compressed-tensors", "config_groups": {"a": 1}}, "config_groups.a is 1; it must be"),
]


@pytest.mark.parametrize(("stated", "problem"), STATED, ids=[problem[:40] for _, problem in STATED])
def test_unknown_quantisation_is_refused_before_anything_is_read(golden, stated, problem):
    edit_config(golden, quantization_config=stated)
    (golden / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=re.escape(problem)):
        load_model(golden, "float32")


def test_an_embedding_cannot_be_in_nvfp4(golden):
    def change(tensors: dict[str, np.ndarray]) -> None:
        name = "model.embed_tokens.weight"
        tensors.update(stored_tensors(name, quantize(jnp.asarray(tensors.pop(name))), None, "modelopt"))

    edit_stored(golden, change)
    with pytest.raises(CheckpointError, match="embed_tokens.weight is in NVFP4, which only linear layers"):
        load_model(golden, "float32")


def test_some_experts_in_nvfp4_and_some_not_is_refused(qwen):
    directory = qwen("text_small")
    apart(directory)
    rounded(directory, only=EXPERT, skip="*experts.1.up_proj*")
    with pytest.raises(CheckpointError, match=r"is in NVFP4, but .*experts.1.up_proj.weight is not"):
        load_model(directory, "float32")
