"""What the engine's flags say of quantised checkpoints."""

import logging
from pathlib import Path

import pytest

from hybridjax.calibration import Quantization, Settings
from hybridjax.checkpoints import load_model, quantization_of
from hybridjax.checkpoints.nvfp4 import weights_in_nvfp4, without_input_scale
from hybridjax.configs import EngineConfig
from hybridjax.errors import ConfigError
from hybridjax.serving import Engine
from hybridjax.serving.quantized import check_quantization, prepare

GOLDEN = Path(__file__).parents[1] / "goldens" / "minicpm_sala" / "dense"


@pytest.fixture(scope="module")
def rounded(tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("rounded") / "compressed"
    Quantization(
        GOLDEN, target, "compressed-tensors", Settings(method="rtn", weights_only=True), progress=False
    ).quantize()
    return target


def test_the_headers_say_how_a_checkpoint_is_stored(rounded):
    assert quantization_of(rounded) == ("nvfp4", "compressed-tensors")
    assert quantization_of(GOLDEN) == ("none", None)


@pytest.mark.parametrize(
    ("flag", "problem"),
    [
        ("auto", None),
        ("nvfp4", None),
        ("compressed-tensors", None),
        ("fp8", "quantization is 'fp8', but the checkpoint's is nvfp4 in the layout of compressed-tensors"),
        ("none", "quantization is 'none', but the checkpoint's is nvfp4"),
        (
            "modelopt_fp4",
            "quantization is 'modelopt_fp4', but the checkpoint's is nvfp4 in the layout of comp",
        ),
    ],
)
def test_a_checkpoint_must_be_what_the_flag_says(rounded, flag, problem):
    config = EngineConfig(model_path=str(rounded), quantization=flag)
    if problem is None:
        check_quantization(config, rounded)
        return
    with pytest.raises(ConfigError, match=problem):
        check_quantization(config, rounded)
    with pytest.raises(ConfigError, match=problem):
        Engine(str(rounded), quantization=flag, skip_tokenizer_init=True)


def test_a_dense_checkpoint_is_not_nvfp4():
    with pytest.raises(ConfigError, match="quantization is 'nvfp4', but the checkpoint's is none"):
        check_quantization(EngineConfig(quantization="nvfp4"), GOLDEN)


def test_deterministic_inference_pins_one_path(rounded, caplog):
    model = load_model(rounded, "float32")
    with caplog.at_level(logging.INFO):
        prepare(EngineConfig(), model)
        assert {weight.activations for weight in weights_in_nvfp4(model)} == {"auto"}
        prepare(EngineConfig(enable_deterministic_inference=True), model)
        assert {weight.activations for weight in weights_in_nvfp4(model)} == {"w4a16"}
        prepare(EngineConfig(nvfp4_activations="by-rows"), model)
        assert {weight.activations for weight in weights_in_nvfp4(model)} == {"by_rows"}
    assert "weights in NVFP4; products: w4a16" in caplog.text
    assert "W4A4 is emulated on cpu: exact, but slower" in caplog.text
    with pytest.raises(ConfigError, match="'by-rows', which depends on the batch"):
        EngineConfig(nvfp4_activations="by-rows", enable_deterministic_inference=True)


def test_w4a4_needs_calibrated_activations(rounded):
    with pytest.raises(ConfigError, match=r"nvfp4_activations is 'w4a4', but layers.* has no input scale"):
        prepare(EngineConfig(nvfp4_activations="w4a4"), load_model(rounded, "float32"))


def test_w4a4_is_refused_before_weights_are_read(rounded):
    config = EngineConfig(nvfp4_activations="w4a4")
    problem = r"nvfp4_activations is 'w4a4', but model\.layers\..*weight has no input scale; calibrate"
    with pytest.raises(ConfigError, match=problem):
        check_quantization(config, rounded)
    with pytest.raises(ConfigError, match="'w4a4', but no weight of the checkpoint is in NVFP4"):
        check_quantization(config, GOLDEN)


def test_calibrated_weights_are_told_from_others():
    names = ["a.weight", "a.weight_scale", "a.weight_scale_2", "a.input_scale", "norm.weight"]
    packed = ["b.weight_packed", "b.weight_scale", "b.weight_global_scale", "b.input_global_scale"]
    assert without_input_scale([*names, *packed]) is None
    assert without_input_scale([*names[:3], *packed]) == "a.weight"
    assert without_input_scale([*names, *packed[:3]]) == "b.weight"


def test_a_dense_model_has_no_use_for_the_flag(caplog):
    prepare(EngineConfig(nvfp4_activations="w4a16"), load_model(GOLDEN, "float32"))
    assert "no weight is in NVFP4" in caplog.text
    with pytest.raises(ConfigError, match="'w4a4', but no weight of the checkpoint is in NVFP4"):
        prepare(EngineConfig(nvfp4_activations="w4a4"), load_model(GOLDEN, "float32"))


@pytest.mark.parametrize("field", ["quantization", "nvfp4_activations"])
def test_unknown_values_are_refused(field):
    with pytest.raises(ConfigError, match=f"{field} is 'int4'; it must be one of auto"):
        EngineConfig(**{field: "int4"})
