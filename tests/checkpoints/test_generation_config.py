"""generation_config.json: read by name, refused by name, kept when a model is saved."""

import json

import pytest
from damage import GOLDENS

from hybridjax.checkpoints import generation_config, load_config, load_model, save_pretrained
from hybridjax.checkpoints.generation import GenerationDefaults
from hybridjax.errors import CheckpointError


def test_generation_defaults_of_a_saved_model(tmp_path):
    save_pretrained(load_model(GOLDENS / "dense"), tmp_path / "out")
    assert generation_config(tmp_path / "out") == GenerationDefaults(
        eos_token_id=(2, 96), bos_token_id=1, pad_token_id=2, do_sample=True
    )


def test_generation_defaults_are_read(tmp_path):
    assert generation_config(tmp_path) == GenerationDefaults()
    values = {"eos_token_id": 7, "temperature": 1, "top_p": 0.8, "top_k": 20, "do_sample": False, "other": []}
    (tmp_path / "generation_config.json").write_text(json.dumps(values))
    defaults = generation_config(tmp_path)
    assert (defaults.eos_token_id, defaults.temperature, defaults.top_p) == ((7,), 1, 0.8)
    assert (defaults.top_k, defaults.do_sample, defaults.min_p) == (20, False, None)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"eos_token_id": "x"}, "eos_token_id is 'x'; it must be an id or a list of ids"),
        ({"eos_token_id": [True]}, "eos_token_id"),
        ({"temperature": "hot"}, "temperature is 'hot'; it must be of type int or float"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_k": 1.5}, "top_k is 1.5; it must be of type int"),
        ({"top_k": True}, "top_k is True"),
        ({"temperature": -3}, "temperature is -3; it must be between 0 and 100"),
        ({"temperature": 10**400}, "temperature is 10+; it must be between 0 and 100"),
        ({"top_p": 1.5}, "top_p is 1.5; it must be between 0 and 1"),
        ({"top_k": -2}, "top_k is -2; it must be between -1 and"),
        ({"min_p": -0.1}, "min_p is -0.1"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0; it must be between 0.01 and 100"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"bos_token_id": -1}, r"bos_token_id is -1; it must be an id in 0\.\."),
        ({"pad_token_id": [2]}, r"pad_token_id is \[2\]; it must be an id in"),
        ({"do_sample": 1}, "do_sample is 1; it must be of type bool"),
        ([], "must be an object"),
    ],
)
def test_broken_generation_defaults(tmp_path, values, message: str):
    (tmp_path / "generation_config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=f"generation_config.json: .*{message}"):
        generation_config(tmp_path)


@pytest.mark.parametrize("name", ["eos_token_id", "bos_token_id", "pad_token_id"])
def test_token_ids_must_be_in_the_vocabulary_of_the_model(golden, name: str):
    vocab = load_config(golden).vocab_size
    file = golden / "generation_config.json"
    file.write_text(json.dumps({name: vocab - 1}))
    load_model(golden)
    file.write_text(json.dumps({name: vocab}))
    with pytest.raises(CheckpointError, match=f"generation_config.json: {name} is {vocab}; .*0..{vocab - 1}"):
        load_model(golden)


def test_defaults_out_of_range_are_found_when_the_model_is_loaded(golden):
    (golden / "generation_config.json").write_text('{"temperature": -3}')
    with pytest.raises(CheckpointError, match="golden/generation_config.json: temperature is -3"):
        load_model(golden)


def test_writing_and_reading_defaults_changes_nothing(tmp_path):
    defaults = GenerationDefaults(eos_token_id=(1, 2), top_k=-1, do_sample=False, extra={"x": {"y": [1]}})
    (tmp_path / "generation_config.json").write_text(json.dumps(defaults.to_dict()))
    assert generation_config(tmp_path) == defaults
