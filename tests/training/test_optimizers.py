"""Which tensors get which update, the schedules, and the names that training works on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from training_fakes import VOCABULARY, Bigram, small_experiment, small_model

from hybridjax.errors import ConfigError
from hybridjax.models import ARCHITECTURES
from hybridjax.models.base import TensorEntry
from hybridjax.training.config import OptimizerConfig, ScheduleConfig
from hybridjax.training.experiments import EXPERIMENTS
from hybridjax.training.optimizers import MATRIX, TABLE, VECTOR, kind_of, make_optimizer, make_schedule
from hybridjax.training.parameters import ParameterLayout, count


@pytest.fixture(scope="module")
def model():
    architecture = ARCHITECTURES["MiniCPMSALAForCausalLM"]
    return architecture.model(small_model(), dtype=jnp.float32, rngs=nnx.Rngs(0))


def test_tensors_have_the_checkpoints_names_and_shapes(model):
    tensors = ParameterLayout.of(model).tensors(model)
    entries = {e.name: e.shape for e in model.checkpoint_entries(model.config)}
    assert {name: t.shape for name, t in tensors.items()} == entries
    assert count(tensors) == sum(
        np.prod(v.get_value().shape) for _, v in nnx.to_flat_state(nnx.state(model, nnx.Param))
    )


def test_tensors_make_the_model_again(model):
    layout = ParameterLayout.of(model)
    ids = jnp.arange(130, dtype=jnp.int32).reshape(1, 130)
    again = layout.model(layout.tensors(model), jnp.float32)
    call = nnx.jit(lambda m, ids: m(ids))
    assert (call(again, ids) == call(model, ids)).all()
    halves = layout.model(layout.tensors(model), jnp.bfloat16)
    assert {v.get_value().dtype for _, v in nnx.to_flat_state(nnx.state(halves, nnx.Param))} == {
        jnp.dtype(jnp.bfloat16)
    }


def test_entries_that_do_not_tile_a_parameter_are_refused():
    class Gap(Bigram):
        config = None

        def checkpoint_entries(self, config):
            return [TensorEntry("hidden", (8, 16), ("hidden",), 8)]

    with pytest.raises(ConfigError, match="do not tile"):
        ParameterLayout.of(Gap(VOCABULARY))


def test_every_tensor_of_the_model_has_the_right_kind(model):
    kinds = {n: kind_of(n, t.ndim) for n, t in ParameterLayout.of(model).tensors(model).items()}
    assert kinds["model.embed_tokens.weight"] == kinds["lm_head.weight"] == TABLE
    for name, kind in kinds.items():
        if "proj" in name or "gate" in name:
            assert kind == MATRIX, name
        elif "norm" in name:
            assert kind == VECTOR, name


def test_every_tensor_of_qwen4_exp_has_the_right_kind():
    config = EXPERIMENTS["tiny_flash_next"]().model
    entries = ARCHITECTURES[config.architecture].model.checkpoint_entries(config)
    kinds = {e.name: kind_of(e.name, len(e.shape)) for e in entries}
    tables = {name for name, kind in kinds.items() if kind == TABLE}
    shards = {name for name in kinds if ".ngram_embedding.shard_" in name}
    assert len(shards) == 4 and tables == {"model.embed_tokens.weight", "lm_head.weight"} | shards
    vectors = ("norm", "A_log", "dt_bias", "conv1d", "in_proj_a", "in_proj_b")
    gates = ("mlp.gate.", "shared_expert_gate.", "block_inject")
    for name, kind in kinds.items():
        if any(part in name for part in vectors + gates):
            assert kind == VECTOR, name
        elif name not in tables:
            assert kind == MATRIX, name
    assert kinds["model.layers.0.mlp.experts.gate_up_proj"] == MATRIX
    assert kinds["mtp.fc_embedding.weight"] == MATRIX


def test_a_stack_of_experts_is_updated_as_its_matrices_are(tensors):
    schedule = ScheduleConfig(warmup_steps=0)
    stack = jnp.stack([tensors["hidden"], tensors["same"]])
    together = {"mlp.experts.up": stack, "hidden": tensors["other"].T}
    apart = {"a": stack[0], "b": stack[1], "hidden": tensors["other"].T}
    for name in ("muon", "adamw"):
        config = small_experiment(optimizer=OptimizerConfig(name=name), schedule=schedule)
        one, each = (update(config, t, jax.tree.map(jnp.sin, t)) for t in (together, apart))
        np.testing.assert_allclose(one["mlp.experts.up"], jnp.stack([each["a"], each["b"]]), atol=1e-7)
        np.testing.assert_allclose(one["hidden"], each["hidden"], atol=1e-7)


def update(config, tensors, grads):
    optimizer = make_optimizer(config, tensors)
    return jax.jit(optimizer.update)(grads, optimizer.init(tensors), tensors)[0]


@pytest.fixture
def tensors():
    key = jax.random.key(0)
    shapes = {"embed_tokens": (30, 16), "lm_head": (30, 16), "norm": (16,)}
    shapes |= {"hidden": (16, 48), "other": (48, 16), "same": (16, 48)}
    return {n: jax.random.normal(jax.random.fold_in(key, i), s) for i, (n, s) in enumerate(shapes.items())}


def test_muon_turns_hidden_matrices_and_leaves_the_rest_to_adam(tensors):
    settings = {"weight_decay": 0.0, "learning_rate": 1.0, "embedding_learning_rate": 1.0}
    schedule = ScheduleConfig(warmup_steps=0)
    grads = jax.tree.map(jnp.sin, tensors)
    muon, adam = (
        update(
            small_experiment(optimizer=OptimizerConfig(name=name, **settings), schedule=schedule),
            tensors,
            grads,
        )
        for name in ("muon", "adamw")
    )
    for name in ("embed_tokens", "lm_head", "norm"):
        np.testing.assert_array_equal(muon[name], adam[name])
    for name in ("hidden", "other", "same"):
        left, _, right = np.linalg.svd(np.asarray(grads[name]), full_matrices=False)
        turned = -left.T @ np.asarray(muon[name]) @ right.T / (0.2 * 48**0.5)
        np.testing.assert_allclose(turned, np.diag(np.diag(turned)), atol=1e-4)
        assert np.diag(turned).min() > 0.5 and np.diag(turned).max() < 1.3


def test_only_hidden_matrices_and_the_head_decay(tensors):
    zero = jax.tree.map(jnp.zeros_like, tensors)
    config = small_experiment(
        optimizer=OptimizerConfig(name="adamw"), schedule=ScheduleConfig(warmup_steps=0)
    )
    found = update(config, tensors, zero)
    moved = {name for name, change in found.items() if jnp.any(change != 0)}
    assert moved == {"hidden", "other", "same", "lm_head"}
    np.testing.assert_allclose(found["hidden"], -3e-3 * 0.1 * tensors["hidden"], rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("wsd", {0: 0.25, 3: 1.0, 11: 1.0, 15: 0.55, 19: 0.1}),
        ("cosine", {0: 0.25, 3: 1.0, 11: 0.55, 19: 0.1}),
    ],
)
def test_schedules_warm_up_and_end_at_the_final_scale(name, values):
    schedule = ScheduleConfig(name=name, warmup_steps=4, decay_share=0.4, final_scale=0.1)
    factor = make_schedule(small_experiment(steps=20, schedule=schedule))
    for step, value in values.items():
        assert float(factor(step)) == pytest.approx(value, rel=1e-5), step
