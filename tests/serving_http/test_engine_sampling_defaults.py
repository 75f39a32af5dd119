"""What the engine tells the server about a checkpoint's generation_config.json."""

import json
from pathlib import Path

import pytest

from hybridjax.checkpoints import generation_config, resolve
from hybridjax.errors import CheckpointError
from hybridjax.serving.engine import _sampling_defaults


def recommended(directory: Path) -> dict[str, float]:
    return _sampling_defaults(directory, generation_config(directory))


def test_the_bundled_model_recommends_nothing():
    assert recommended(resolve("tiny-sala")) == {}


def test_a_checkpoint_recommends_what_it_names(tmp_path: Path):
    named = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.05}
    others = {"do_sample": True, "max_new_tokens": 9, "eos_token_id": 2}
    (tmp_path / "generation_config.json").write_text(json.dumps(named | others))
    assert recommended(tmp_path) == named


def test_a_recommendation_that_cannot_work_is_told_before_the_weights_are_read(tmp_path: Path):
    (tmp_path / "generation_config.json").write_text('{"temperature": -1}')
    from hybridjax.serving import Engine

    with pytest.raises(CheckpointError, match=r"generation_config.json: temperature is -1"):
        Engine(str(tmp_path))
