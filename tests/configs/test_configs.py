"""Configurations: what released files say is read exactly, what cannot work is refused by name."""

import argparse
import copy
import dataclasses
import json
import pickle
from pathlib import Path

import pytest

from hybridjax.configs import EngineConfig, MiniCPMSALAConfig, ServerConfig, SparseConfig
from hybridjax.configs.flags import add_flags, from_flags, readable_int
from hybridjax.configs.frozen_dict import FrozenDict
from hybridjax.configs.minicpm_sala import LINEAR, SPARSE
from hybridjax.errors import ConfigError

GOLDEN = json.loads(
    (Path(__file__).parent.parent / "goldens" / "minicpm_sala" / "sparse" / "config.json").read_text()
)


def test_defaults_are_the_released_model():
    config = MiniCPMSALAConfig()
    sparse = [i for i, kind in enumerate(config.mixer_types) if kind == SPARSE]
    assert sparse == [0, 9, 16, 17, 22, 29, 30, 31]
    assert config.residual_scale == pytest.approx(0.2474874, abs=1e-7)
    assert config.logit_divisor == 16
    assert config.lightning_scale_value == pytest.approx(128**-0.5)
    assert config.sparse_config.selected_blocks == 96
    assert config.sparse_config.max_listed_blocks == 128


def test_writing_and_reading_a_config_changes_nothing():
    for config in (MiniCPMSALAConfig(), MiniCPMSALAConfig.from_dict(GOLDEN)):
        assert MiniCPMSALAConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_fields_that_mean_nothing_here_are_kept():
    raw = {**GOLDEN, "mup_denominator": 16, "plan": {"a": [1]}, "auto_map": {"AutoModel": "code.py"}}
    config = MiniCPMSALAConfig.from_dict(raw)
    assert config.extra == {"mup_denominator": 16, "plan": {"a": (1,)}}
    assert MiniCPMSALAConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert config != MiniCPMSALAConfig.from_dict(GOLDEN)
    assert hash(config) == hash(MiniCPMSALAConfig.from_dict(raw))
    known = dataclasses.replace(config, extra={"hidden_size": 1, "sparse_config": {"topk": 1, "new": 2}})
    assert known.to_dict()["hidden_size"] == GOLDEN["hidden_size"]
    assert known.to_dict()["sparse_config"].items() >= {"topk": 5, "new": 2}.items()


def test_what_a_config_keeps_cannot_change():
    kept = FrozenDict({"a": [{"b": 1}]})
    assert kept == {"a": ({"b": 1},)}
    assert copy.deepcopy(kept) == pickle.loads(pickle.dumps(kept)) == kept  # noqa: S301
    for change in (
        lambda: kept.update(a=1),
        lambda: kept["a"][0].pop("b"),
        lambda: kept.__setitem__("a", 1),
        kept.clear,
    ):
        with pytest.raises(TypeError, match="cannot be changed"):
            change()


def test_aliases_and_short_lists_of_mixers():
    raw = {**GOLDEN, "mixer_types": ["attn", "lightning"]}
    assert MiniCPMSALAConfig.from_dict(raw).mixer_types == (SPARSE, LINEAR, SPARSE, LINEAR)


def test_without_sparse_config_every_query_is_dense():
    config = MiniCPMSALAConfig.from_dict({**GOLDEN, "sparse_config": None})
    assert config.sparse_config.dense_len > config.max_position_embeddings


def test_one_end_token_or_none():
    assert MiniCPMSALAConfig.from_dict({**GOLDEN, "eos_token_id": 5}).eos_token_id == (5,)
    assert MiniCPMSALAConfig.from_dict({**GOLDEN, "eos_token_id": None}).eos_token_id == ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": -1}, "hidden_size is -1; it must be a positive integer"),
        ({"hidden_size": "64"}, "hidden_size is '64'; it must be of type int"),
        ({"hidden_size": True}, "hidden_size is True; it must be of type int"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3; it must be a divisor"),
        ({"lightning_nkv": 2}, "lightning_nkv is 2; it must be equal to lightning_nh"),
        ({"mixer_types": ["mamba"]}, r"mixer_types\[0\] is 'mamba'; allowed"),
        ({"mixer_types": []}, "mixer_types is"),
        ({"mixer_types": ["attn"] * 9}, "mixer_types has 9 entries; num_hidden_layers is 4"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"lightning_scale": "1/d^2"}, "lightning_scale is '1/d\\^2'; allowed"),
        ({"attention_bias": True}, "attention_bias is True; supported: False"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling is"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"eos_token_id": [2, 97]}, "eos_token_id is 97"),
        ({"eos_token_id": "2"}, "eos_token_id is '2'"),
        ({"torch_dtype": "float8"}, "dtype is 'float8'"),
        ({"sparse_config": [1]}, "sparse_config is"),
        ({"sparse_config": {"block_size": 48}}, "block_size is 48; it must be 64; the implementation works"),
        ({"sparse_config": {"block_size": 0}}, "sparse_config.block_size is 0; it must be 64"),
        ({"sparse_config": {"kernel_size": 16}}, "sparse_config.kernel_size is 16; it must be 32"),
        ({"sparse_config": {"kernel_stride": 8}}, "sparse_config.kernel_stride is 8; it must be 16"),
        (
            {"sparse_config": {"block_size": 128, "kernel_size": 64, "kernel_stride": 32}},
            "sparse_config.block_size is 128; it must be 64; the implementation works on 64-token tiles",
        ),
        ({"sparse_config": {"window_size": 100}}, "sparse_config.window_size is 100"),
        ({"sparse_config": {"topk": 1}}, "sparse_config.topk is 1; it must be at least"),
        ({"sparse_config": {"topk": "x"}}, "sparse_config.topk is 'x'"),
    ],
)
def test_what_cannot_work_is_refused_by_name(change, message):
    with pytest.raises(ConfigError, match=message):
        MiniCPMSALAConfig.from_dict({**GOLDEN, **change})


FLOATS = [f.name for f in dataclasses.fields(MiniCPMSALAConfig) if f.type in (float, str | float)]


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("name", [*FLOATS, "hidden_size", "eos_token_id"])
def test_numbers_that_are_not_finite_are_refused_by_name(name, text):
    value = json.loads(text)
    with pytest.raises(ConfigError, match=f"^{name} is {value}"):
        MiniCPMSALAConfig.from_dict({**GOLDEN, name: value})
    if name in FLOATS:
        with pytest.raises(ConfigError, match=f"^{name} is {value}; it must be finite"):
            MiniCPMSALAConfig(**{name: value})


def test_the_float_fields_are_known():
    assert set(FLOATS) >= {"rms_norm_eps", "rope_theta", "scale_emb", "scale_depth", "initializer_range"}


@pytest.mark.parametrize("name", FLOATS)
def test_an_integer_beyond_all_floats_is_refused_by_name(name):
    with pytest.raises(ConfigError, match=f"^{name} is beyond the range of a float"):
        MiniCPMSALAConfig.from_dict({**GOLDEN, name: 10**400})


@pytest.mark.parametrize("value", [0, -0.1])
def test_weights_need_a_range(value):
    with pytest.raises(ConfigError, match="initializer_range is .* it must be above 0"):
        MiniCPMSALAConfig.from_dict({**GOLDEN, "initializer_range": value})


def test_missing_mixer_types_is_an_error():
    raw = {k: v for k, v in GOLDEN.items() if k != "mixer_types"}
    with pytest.raises(ConfigError, match="mixer_types is missing"):
        MiniCPMSALAConfig.from_dict(raw)


def parse(*flags):
    parser = argparse.ArgumentParser()
    add_flags(parser, ServerConfig)
    return from_flags(ServerConfig, parser.parse_args(flags))


def test_every_field_is_a_flag_with_its_default():
    assert parse() == ServerConfig()
    flags = {f.name for f in dataclasses.fields(ServerConfig)}
    assert flags >= {
        "model_path",
        "tokenizer_path",
        "served_model_name",
        "host",
        "port",
        "context_length",
        "mem_fraction_static",
        "max_running_requests",
        "chunked_prefill_size",
        "dtype",
        "random_seed",
    }


def test_flags_set_fields():
    config = parse("--model", "x", "--context-length", "64k", "--dtype", "float32", "--skip-server-warmup")
    assert (config.model_path, config.context_length, config.dtype) == ("x", 65536, "float32")
    assert config.skip_server_warmup


@pytest.mark.parametrize("text", ["", "k", "1.5", "ten", "4kk"])
def test_numbers_that_are_none(text):
    with pytest.raises(argparse.ArgumentTypeError):
        readable_int(text)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("mem_fraction_static", 0.0),
        ("mem_fraction_static", 1.5),
        ("chunked_prefill_size", 0),
        ("chunked_prefill_size", -2),
        ("context_length", 0),
        ("max_running_requests", 0),
        ("num_continuous_decode_steps", 0),
        ("dtype", "int8"),
        ("random_seed", -1),
        ("random_seed", None),
        ("random_seed", True),
        ("mem_fraction_static", "0.5"),
        ("chunked_prefill_size", "64"),
        ("model_path", 5),
        ("skip_server_warmup", 1),
    ],
)
def test_settings_that_cannot_work(field, value):
    with pytest.raises(ConfigError, match=f"{field} is"):
        EngineConfig(**{field: value})


def test_selection_settings_of_the_specification():
    config = SparseConfig()
    assert (config.local_blocks, config.selected_blocks) == (32, 96)
