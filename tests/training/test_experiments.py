"""Experiments are data: every field can be replaced by name, and mistakes are named."""

import math

import pytest

from hybridjax.configs.minicpm_sala import LINEAR, SPARSE
from hybridjax.errors import ConfigError
from hybridjax.models import ARCHITECTURES
from hybridjax.training.experiments import EXPERIMENTS, describe, override, parse_value


@pytest.fixture
def config():
    return EXPERIMENTS["tiny_sala"]()


def parameters(config):
    entries = ARCHITECTURES[config.model.architecture].model.checkpoint_entries(config.model)
    return sum(math.prod(e.shape) for e in entries)


def test_every_experiment_can_be_made_and_bears_its_name():
    for name in EXPERIMENTS:
        assert EXPERIMENTS[name]().name == name
        assert f"{name} " in describe()


def test_the_bundled_model_is_small_hybrid_and_truly_sparse(config):
    model = config.model
    assert parameters(config) == 5_543_744
    assert set(model.mixer_types) == {SPARSE, LINEAR}
    assert model.sparse_config.selected_blocks == 12
    assert model.max_position_embeddings // model.sparse_config.block_size == 64


def test_the_second_bundled_model_has_every_part_of_the_release():
    config = EXPERIMENTS["tiny_flash_next"]()
    model = config.model
    assert parameters(config) == 5_812_616
    assert set(model.layer_types) == {"linear_attention", "indexed_attention"}
    assert model.num_experts == 16 and model.hc_count == 4 and model.ple_layers == (1,)
    assert model.mtp_num_hidden_layers == 1 and not model.tie_word_embeddings
    assert model.indexer_budget < config.sequence_length
    # What ran: 499 steps at the peak, the first 100 of them warming up, and 400 of decay.
    assert round(config.schedule.decay_share * config.steps) == 400


def test_losses_beside_the_next_token_have_weights():
    config = override(
        EXPERIMENTS["tiny_flash_next"](), "mtp_loss=0.1", "indexer_loss=2", "model.router_aux_loss_coef=0.5"
    )
    assert [config.loss_weight(name) for name in ("router", "mtp", "indexer")] == [0.5, 0.1, 2.0]
    changed = override(
        config,
        "model.rope_parameters.rope_theta=1e6",
        "implementation=experts=blocked",
        "model.ple_layer_ids=",
    )
    assert changed.model.rope_parameters.rope_theta == 1e6 and changed.model.ple_layers == ()
    assert changed.implementation == "experts=blocked"


@pytest.mark.parametrize(
    ("assignment", "read"),
    [
        ("steps=7", lambda c: c.steps == 7),
        ("sequence_length=1k", lambda c: c.sequence_length == 1024),
        ("optimizer.learning_rate=1e-3", lambda c: c.optimizer.learning_rate == 1e-3),
        ("optimizer.weight_decay=0", lambda c: c.optimizer.weight_decay == 0.0),
        (" schedule.name = cosine ", lambda c: c.schedule.name == "cosine"),
        ("remat=true", lambda c: c.remat is True),
        ("model.sparse_config.dense_len=4096", lambda c: c.model.sparse_config.dense_len == 4096),
        ("model.lightning_scale=0.5", lambda c: c.model.lightning_scale == 0.5),
        ("model.lightning_scale=1/d", lambda c: c.model.lightning_scale == "1/d"),
        ("model.pad_token_id=none", lambda c: c.model.pad_token_id is None),
        ("model.eos_token_id=2,4", lambda c: c.model.eos_token_id == (2, 4)),
        ("data.evaluation_documents=3", lambda c: c.data.evaluation_documents == 3),
        ("data.directory=a=b", lambda c: c.data.directory == "a=b"),
    ],
)
def test_a_field_is_replaced_by_its_path(config, assignment, read):
    assert read(override(config, assignment))


def test_dependent_fields_change_together_and_the_last_value_counts(config):
    changed = override(
        config,
        "model.num_hidden_layers=2",
        f"model.mixer_types={LINEAR},{SPARSE}",
        "steps=5",
        "steps=6",
    )
    assert changed.model.mixer_types == (LINEAR, SPARSE) and changed.steps == 6
    assert config.steps != 6


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("steps", "expected field=value"),
        ("=3", "expected field=value"),
        ("step=3", "unknown field 'step'; known: .*steps"),
        ("optimizer.lr=3", "unknown field 'optimizer.lr'; known: .*optimizer.learning_rate"),
        ("model.sparse_config.top=3", "unknown field .*known: .*model.sparse_config.topk"),
        ("steps=many", "steps is 'many'; it must be of type int"),
        ("steps=1.5", "steps is '1.5'; it must be of type int"),
        ("remat=yes", "remat is 'yes'; it must be of type bool"),
        ("optimizer.learning_rate=fast", "optimizer.learning_rate is 'fast'; it must be of type float"),
        ("data.evaluation_documents=all", "must be of type none or int|must be of type int or none"),
        ("optimizer=adamw", "'optimizer' has fields of its own; set one of: optimizer.name"),
        ("steps.x=1", "'steps' is a plain value"),
        ("optimizer.name=sgd", "optimizer.name is 'sgd'; it must be 'muon' or 'adamw'"),
        ("schedule.name=linear", "schedule.name is 'linear'"),
        ("compute_dtype=float16", "compute_dtype is 'float16'"),
        ("microbatches=5", "batch_size is 32; it must be such that"),
        ("sequence_length=8192", "at most max_position_embeddings"),
        ("steps=0", "steps is 0; it must be a positive integer"),
        ("model.num_hidden_layers=3", "mixer_types"),
        ("data.evaluation_length=7", "data.evaluation_length is 7; it must be an even number"),
    ],
)
def test_mistakes_are_named(config, assignment, message):
    with pytest.raises(ConfigError, match=message):
        override(config, assignment)


def test_a_field_cannot_be_a_value_and_a_path(config):
    with pytest.raises(ConfigError, match="set to a value elsewhere"):
        override(config, "optimizer=adamw", "optimizer.name=adamw")


def test_an_unknown_experiment_lists_the_known_ones():
    with pytest.raises(
        ConfigError, match="unknown experiment 'tiny'; known: tiny_flash_next, .*tiny_sala, tiny_sala_adamw"
    ):
        EXPERIMENTS["tiny"]


def test_tuples_take_commas_and_no_trailing_one():
    assert parse_value("x", "1, 2,", tuple[int, ...]) == (1, 2)


def test_the_last_steps_see_long_sequences_and_as_many_tokens(config):
    config = override(config, "steps=10", "long_share=0.3")
    shapes = [config.shape_at(step) for step in range(10)]
    assert shapes == [(32, 2048)] * 7 + [(16, 4096)] * 3


@pytest.mark.parametrize("value", ["nan", "inf", "1e999"])
@pytest.mark.parametrize(
    "name",
    ["z_loss", "long_share", "optimizer.learning_rate", "optimizer.grad_clip", "schedule.final_scale"],
)
def test_settings_that_are_not_finite_are_refused(name: str, value: str):
    with pytest.raises(ConfigError, match=f"{name} is (nan|inf); it must be finite"):
        override(EXPERIMENTS["tiny_sala"](), f"{name}={value}")


@pytest.mark.parametrize("assignment", ["model.extra=1", "model.extra.x=1"])
def test_what_is_no_plain_value_cannot_be_set(assignment):
    with pytest.raises(ConfigError, match="model.extra"):
        override(EXPERIMENTS["tiny_sala"](), assignment)
