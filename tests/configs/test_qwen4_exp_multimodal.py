"""The multimodal configuration: released files are read exactly, what cannot work is refused by name."""

import dataclasses
import json
from pathlib import Path

import pytest

from hybridjax.configs import Qwen4ExpConfig
from hybridjax.configs.qwen4_exp_multimodal import Qwen4ExpMultimodalConfig, Qwen4ExpVisionConfig
from hybridjax.errors import ConfigError

GOLDEN = json.loads(
    (Path(__file__).parent.parent / "goldens" / "qwen4_exp" / "multimodal" / "config.json").read_text()
)


def changed(**changes):
    """The golden file with ``section__field`` or ``field`` set; None removes."""
    raw = json.loads(json.dumps(GOLDEN))
    for name, value in changes.items():
        section, _, field = name.rpartition("__")
        target = raw[section] if section else raw
        target[field] = value
        if value is None:
            del target[field]
    return raw


def test_defaults_are_the_released_model():
    config = Qwen4ExpMultimodalConfig()
    vision = config.vision_config
    assert (vision.head_dim, vision.grid_side, vision.patch_values, vision.merge_unit) == (72, 48, 1536, 4)
    assert config.hidden_size == vision.out_hidden_size == 2560
    assert (config.vocab_size, config.max_position_embeddings) == (248320, 262144)
    assert config.eos_token_id == (248044,)
    assert Qwen4ExpMultimodalConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_a_released_file_is_written_as_it_was_read():
    config = Qwen4ExpMultimodalConfig.from_dict(GOLDEN)
    assert config.to_dict() == GOLDEN
    assert config.text_config.dtype == config.dtype == "float32"
    assert config.vision_config == Qwen4ExpVisionConfig(
        depth=2, hidden_size=32, intermediate_size=64, num_heads=2, patch_size=4, out_hidden_size=64,
        num_position_embeddings=64,
    )  # fmt: skip
    assert hash(config) == hash(Qwen4ExpMultimodalConfig.from_dict(config.to_dict()))


def test_spellings_of_the_released_file():
    raw = changed(vision_config__model_type="qwen4_exp", vision_config__deepstack_visual_indexes=[],
                  vision_config__rope_parameters=None, vision_config__rope_theta=500.0, plan={"a": [1]},
                  vision_config__note="x")  # fmt: skip
    config = Qwen4ExpMultimodalConfig.from_dict(raw)
    assert config.vision_config.rope_theta == 500.0
    assert config.extra["plan"] == {"a": (1,)}
    written = json.loads(json.dumps(config.to_dict()))
    assert written["vision_config"]["rope_parameters"] == {"rope_type": "axial", "rope_theta": 500.0}
    assert written["vision_config"]["model_type"] == "qwen4_exp_vision"
    assert written["vision_config"].items() >= {"deepstack_visual_indexes": [], "note": "x"}.items()
    assert Qwen4ExpMultimodalConfig.from_dict(written) == config


def test_dtype_and_tying_hold_for_the_whole_model():
    config = Qwen4ExpMultimodalConfig.from_dict(changed(dtype="bfloat16", text_config__dtype="float32"))
    assert config.dtype == config.text_config.dtype == "bfloat16"
    config = Qwen4ExpMultimodalConfig.from_dict(changed(dtype=None, text_config__dtype="float16"))
    assert config.dtype == config.text_config.dtype == "float16"
    config = Qwen4ExpMultimodalConfig.from_dict(changed(tie_word_embeddings=True))
    assert config.text_config.tie_word_embeddings
    with pytest.raises(ConfigError, match="tie_word_embeddings is True; it must be that of text_config"):
        dataclasses.replace(Qwen4ExpMultimodalConfig(), tie_word_embeddings=True)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"vision_config__num_heads": 3}, r"vision_config.num_heads is 3; it must be a divisor of .*32"),
        ({"vision_config__num_heads": 16}, r"num_heads is 16; .*\(2\) is a multiple of 4"),
        ({"vision_config__num_position_embeddings": 65}, "num_position_embeddings is 65; .*square"),
        ({"vision_config__out_hidden_size": 32}, r"out_hidden_size is 32; .*text_config.hidden_size \(64\)"),
        ({"vision_config__out_hidden_size": None}, "out_hidden_size is 3584"),
        ({"vision_config__deepstack_visual_indexes": [8]}, r"deepstack_visual_indexes is \[8\]; supported"),
        ({"vision_config__patch_size": [4, 4]}, r"vision_config.patch_size is \[4, 4\]; .*type int"),
        ({"vision_config__depth": 0}, "vision_config.depth is 0; .*positive"),
        ({"vision_config__in_channels": 1}, "in_channels is 1; it must be 3"),
        ({"vision_config__hidden_act": "silu"}, "hidden_act is 'silu'"),
        ({"vision_config__rope_parameters": {"rope_type": "default"}}, "rope_parameters.rope_type is 'def"),
        ({"vision_config__rope_parameters": {"rope_theta": -1}}, r"rope_parameters.rope_theta is -1.0"),
        ({"vision_config__rope_parameters": 7}, "rope_parameters is 7; allowed: an object"),
        ({"vision_config__model_type": "clip"}, "vision_config.model_type is 'clip'"),
        ({"text_config__model_type": "llama"}, "text_config.model_type is 'llama'"),
        ({"model_type": "qwen3_vl"}, "model_type is 'qwen3_vl'; supported: 'qwen4_exp'"),
        ({"dtype": ""}, "dtype is ''; it must be a name"),
        ({"dtype": 0}, "dtype is 0; it must be a name"),
        ({"dtype": False}, "dtype is False; it must be a name"),
        ({"dtype": "float8"}, "dtype is 'float8'; it must be float32, bfloat16 or float16"),
        ({"text_config__pad_token_id": 300}, r"pad_token_id is 300; it must be null or in 0\.\.299"),
        ({"text_config__hc_count": 1}, "text_config: hc_count is 1"),
        ({"image_token_id": 300}, r"image_token_id is 300; it must be in 0\.\.299"),
        ({"video_token_id": 290}, "video_token_id is 290; it must be different from image_token_id"),
        ({"vision_start_token_id": "x"}, "vision_start_token_id is 'x'; it must be of type int"),
        ({"text_config__eos_token_id": 293}, "eos_token_id is 293; .*different from vision_end_token_id"),
        ({"vision_config": 1}, "vision_config is 1; it must be an object"),
        ({"text_config": None}, "text_config is None; it must be an object"),
    ],
)
def test_what_cannot_work_is_refused_by_name(changes, message):
    with pytest.raises(ConfigError, match=message):
        Qwen4ExpMultimodalConfig.from_dict(changed(**changes))


@pytest.mark.parametrize(
    ("field", "value", "most"),
    [
        ("num_experts", 10**6, 8192),
        ("num_experts", 2**63, 8192),
        ("head_dim", 10**400, 2**31 - 1),
        ("ple_conv_kernel_size", 2**63, 32),
        ("indexer_budget", 10**60, 2**31 - 1),
        ("max_position_embeddings", 10**60, 2**31 - 1),
        ("ngram_size", 1000, 16),
    ],
)
def test_sizes_that_no_model_has_are_refused_before_anything_is_made(field, value, most):
    with pytest.raises(ConfigError, match=f"{field} is {value}; it must be at most {most}"):
        Qwen4ExpConfig(**{field: value})
    with pytest.raises(ConfigError, match="depth is 5000; it must be at most 1024"):
        Qwen4ExpVisionConfig(depth=5000)
