"""Float8 weights: what they decode to, and checkpoints that hold them."""

import math
import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from damage import edit_config, edit_stored, read_all

from hybridjax.checkpoints import load_model, save_pretrained
from hybridjax.checkpoints.float8 import FLOAT8, decode_blocks, decode_table, scale_shape, single_scale
from hybridjax.errors import CheckpointError

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
PLE = "model.layers.1.ple.ple_embedding.ngram_embedding."
EXPERT = re.compile(r".*\.mlp\.experts\.\d+\.\w+_proj\.weight")


def decoded(codes: np.ndarray, scales: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """float64 values, element by element."""
    rows, columns = np.indices(codes.shape)
    factors = scales.astype(np.float64)[rows // block[0], columns // block[1]]
    return codes.astype(np.float64) * factors


def quantise_experts(tensors: dict[str, np.ndarray], scale_dtype=np.float32) -> dict[str, np.ndarray]:
    """Stores every single expert as the FP8 release does; returns the float32 values that this means."""
    meant = {}
    for name in [name for name in tensors if EXPERT.fullmatch(name)]:
        value = tensors[name]
        scales = np.zeros(scale_shape(value.shape, (128, 128)), scale_dtype)
        assert scales.shape == (1, 1)
        scales[0, 0] = np.abs(value).max() / 448
        tensors[name] = (value / scales[0, 0].astype(np.float32)).astype(FLOAT8)
        tensors[name + "_scale_inv"] = scales
        meant[name] = tensors[name].astype(np.float32) * scales[0, 0].astype(np.float32)
    return meant


def quantise_table(tensors: dict[str, np.ndarray], scale: float = 0.0099) -> np.ndarray:
    """Stores the n-gram table as the FP8 release does; returns the bfloat16 values that this means."""
    names = [f"{PLE}shard_{i}.weight" for i in range(4)]
    bits = np.array([scale], BFLOAT16)
    tensors[PLE + "weight_scale"] = bits
    for name in names:
        tensors[name] = (tensors[name] / bits.astype(np.float32)).astype(FLOAT8)
    codes = np.concatenate([tensors[name] for name in names])
    return codes.astype(BFLOAT16) * bits


@pytest.mark.parametrize("scale_dtype", [np.float32, BFLOAT16])
@pytest.mark.parametrize("shape", [(256, 384), (300, 200), (1, 1), (127, 129), (640, 260)])
@pytest.mark.parametrize("out_dtype", [np.float32, BFLOAT16])
def test_blocks_decode_exactly_and_edges_may_be_ragged(shape, scale_dtype, out_dtype):
    random = np.random.default_rng(0)
    codes = random.integers(0, 256, shape).astype(np.uint8)
    codes[codes % 128 == 127] = 0  # NaN
    codes = codes.view(FLOAT8)
    block = (128, 128)
    scales = random.uniform(1e-4, 3, scale_shape(shape, block)).astype(scale_dtype)
    assert scales.shape == (math.ceil(shape[0] / 128), math.ceil(shape[1] / 128))
    out = np.empty(shape, out_dtype)
    decode_blocks(codes, scales, block, out)
    wanted = decoded(codes, scales, block).astype(np.float32).astype(out_dtype)
    assert out.tobytes() == wanted.tobytes()


def test_nan_codes_stay_nan():
    out = np.empty((1, 3), np.float32)
    decode_blocks(np.array([[0x7F, 0xFF, 0x38]], np.uint8).view(FLOAT8), np.ones((1, 1)), (128, 128), out)
    assert np.isnan(out[0, :2]).all() and out[0, 2] == 1


@pytest.mark.parametrize("scale", [np.nan, np.inf, -np.inf])
def test_scales_must_be_finite(scale):
    with pytest.raises(CheckpointError, match="not finite"):
        decode_blocks(np.zeros((2, 2), FLOAT8), np.full((1, 1), scale), (128, 128), np.empty((2, 2)))
    with pytest.raises(CheckpointError, match="finite and above 0"):
        single_scale(np.array([scale], np.float32))


def test_tables_are_multiplied_in_bfloat16():
    codes = np.arange(256, dtype=np.uint8).reshape(32, 8).view(FLOAT8)
    scale = float(np.array(1.99317932e-4, BFLOAT16))
    for dtype in (np.dtype(np.float32), BFLOAT16):
        out = np.empty(codes.shape, dtype)
        decode_table(codes, scale, out)
        wanted = (codes.astype(BFLOAT16) * np.array(scale, BFLOAT16)).astype(dtype)
        assert np.array_equal(out, wanted, equal_nan=True)
        assert np.isnan(out.astype(np.float32)).sum() == 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("scale_dtype", [np.float32, BFLOAT16])
def test_experts_are_decoded_on_loading(qwen, tmp_path: Path, scale_dtype, dtype: str):
    directory = qwen("text_mtp")
    meant: dict[str, np.ndarray] = {}
    edit_stored(directory, lambda tensors: meant.update(quantise_experts(tensors, scale_dtype)))
    edit_config(directory, quantization_config={"quant_method": "fp8"})
    model = load_model(directory, dtype)
    assert len(meant) == 4 * 8 * 3
    for i in range(4):
        experts, name = model.layers[i].mlp.experts, f"model.layers.{i}.mlp.experts."
        for e in range(8):
            both = [meant[f"{name}{e}.{part}_proj.weight"] for part in ("gate", "up")]
            assert np.array_equal(experts.gate_up[e], np.concatenate(both).astype(dtype))
            assert np.array_equal(experts.down[e], meant[f"{name}{e}.down_proj.weight"].astype(dtype))
    save_pretrained(model, tmp_path / "out")
    saved = read_all(tmp_path / "out" / "model.safetensors")
    assert not any("scale" in name or value.dtype == FLOAT8 for name, value in saved.items())
    assert "quantization_config" not in (tmp_path / "out" / "config.json").read_text()
    again = load_model(tmp_path / "out")
    assert np.array_equal(again.layers[2].mlp.experts.gate_up[...], model.layers[2].mlp.experts.gate_up[...])


@pytest.mark.parametrize("scale_shape", [(1,), ()])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_float8_table_is_the_same_wherever_it_is(qwen, tmp_path: Path, dtype: str, scale_shape):
    directory = qwen()
    meant: list[np.ndarray] = []

    def change(tensors):
        meant.append(quantise_table(tensors))
        tensors[PLE + "weight_scale"] = tensors[PLE + "weight_scale"].reshape(scale_shape)

    edit_stored(directory, change)
    wanted = meant[0].astype(dtype)
    device = load_model(directory, dtype)
    assert np.array_equal(device.layers[1].ple.table.weight.value[...], wanted)
    for offload in ("host", "mmap"):
        model = load_model(directory, dtype, ple_offload=offload)
        (table,) = model.host_tables
        assert table.stored_dtype == FLOAT8 and table.dtype == wanted.dtype
        assert np.array_equal(table.gather(np.arange(2176)), wanted)
        save_pretrained(model, tmp_path / offload)
        again = load_model(tmp_path / offload)
        assert np.array_equal(again.layers[1].ple.table.weight.value[...], wanted)


def change_one(name: str, value) -> None:
    def change(tensors):
        quantise_experts(tensors)
        quantise_table(tensors)
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value

    return change


DOWN = "model.layers.2.mlp.experts.3.down_proj.weight"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (DOWN + "_scale_inv", None, rf"{DOWN}_scale_inv \[1, 1\] is missing, though {DOWN} is in float8"),
        (DOWN + "_scale_inv", np.ones((1, 2), np.float32), r"has shape \[1, 2\], expected \[1, 1\]"),
        (DOWN + "_scale_inv", np.ones((1, 1), np.float16), "has dtype float16, expected float32 or bfloat16"),
        (DOWN + "_scale_inv", np.full((1, 1), np.nan, np.float32), f"{DOWN}_scale_inv: a scale is not"),
        (DOWN, np.ones((64, 32), np.float32),
         rf"{DOWN} is in float32, but .*experts.0.down_proj.weight, a part of the same, in float8"),
        (DOWN, np.ones((64, 32), np.uint8), rf"{DOWN} in model.safetensors has dtype uint8"),
        (DOWN, np.ones((64, 32), ml_dtypes.float8_e5m2), rf"{DOWN} in .* has dtype float8_e5m2"),
        (DOWN, np.ones((32, 64), FLOAT8), rf"{DOWN} in .* has shape \[32, 64\], expected \[64, 32\]"),
        ("model.layers.0.mlp.gate.weight", np.ones((8, 64), FLOAT8), "gate.weight in .* has dtype float8"),
        (PLE + "weight_scale", None, r"weight_scale \[1\] is missing, though .*shard_0.weight is in float8"),
        (PLE + "weight_scale", np.ones(4, np.float32), r"weight_scale in .* has shape \[4\], expected \[1\]"),
        (PLE + "weight_scale", np.zeros(1, np.float32), "weight_scale: the scale is 0.0; it must be finite"),
        (PLE + "weight_scale", np.array([np.inf], np.float32), "weight_scale: the scale is inf"),
        (PLE + "shard_3.weight", np.ones((544, 16), BFLOAT16),
         "shard_3.weight is in bfloat16, but .*shard_0.weight, a part of the same, in float8"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("offload", ["device", "mmap"])
def test_what_is_wrong_with_float8_is_named(qwen, name: str, value, message: str, offload: str):
    directory = qwen()
    edit_stored(directory, change_one(name, value))
    with pytest.raises(CheckpointError, match=message):
        load_model(directory, ple_offload=offload)


def test_scales_of_what_is_not_in_float8_are_an_error(qwen):
    directory = qwen()
    name = "model.layers.0.mlp.experts.2.up_proj.weight_scale_inv"
    edit_stored(directory, lambda tensors: tensors.update({name: np.ones((1, 1), np.float32)}))
    with pytest.raises(CheckpointError, match=f"{name} is there, but no tensor in float8_e4m3fn"):
        load_model(directory)


def test_float16_cannot_hold_every_scaled_value(qwen):
    directory = qwen()

    def change(tensors):
        quantise_experts(tensors)
        tensors[DOWN + "_scale_inv"] = np.full((1, 1), 1e6, np.float32)

    edit_stored(directory, change)
    with pytest.raises(CheckpointError, match=f"{DOWN} has values beyond the range of float16"):
        load_model(directory, "float16")


def test_a_negative_scale_is_refused():
    codes = np.ones((2, 2), ml_dtypes.float8_e4m3fn)
    with pytest.raises(CheckpointError, match="below 0"):
        decode_blocks(codes, np.full((1, 1), -1, np.float32), (128, 128), np.empty((2, 2), np.float32))
