"""Training on NVFP4 values: what the model sees, where gradients go, and what is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from training_fakes import VOCABULARY, Bigram, small_experiment, small_model

from hybridjax.checkpoints import load_model
from hybridjax.errors import ConfigError
from hybridjax.models import ARCHITECTURES
from hybridjax.quantization import dequantize, quantize, straight_through
from hybridjax.training.parameters import ParameterLayout
from hybridjax.training.trainer import Trainer

MLP = "model.layers.0.mlp."


@pytest.fixture(scope="module")
def model():
    architecture = ARCHITECTURES["MiniCPMSALAForCausalLM"]
    return architecture.model(small_model(), dtype=jnp.float32, rngs=nnx.Rngs(0))


def test_fused_matrices_are_rounded_together_and_the_rest_stays(model):
    layout = ParameterLayout.of(model, "mse")
    tensors = layout.tensors(model)
    seen = layout.tensors(layout.model(tensors, jnp.float32))
    both = jnp.concatenate([tensors[MLP + "gate_proj.weight"], tensors[MLP + "up_proj.weight"]])
    want = np.split(np.asarray(dequantize(quantize(both, "mse"))), 2)
    np.testing.assert_array_equal(seen[MLP + "gate_proj.weight"], want[0])
    np.testing.assert_array_equal(seen[MLP + "up_proj.weight"], want[1])
    changed = {name for name in tensors if not np.array_equal(tensors[name], seen[name])}
    assert changed == layout.rounded
    assert {name for name in tensors if name.endswith(("proj.weight", "gate.weight"))} == layout.rounded
    assert "model.embed_tokens.weight" not in changed and "lm_head.weight" not in changed


@pytest.mark.parametrize("rule", ["static_6", "mse"])
def test_rounding_what_was_rounded_finds_the_same_values_in_bfloat16(model, rule):
    layout = ParameterLayout.of(model, rule)
    once = layout.model(layout.tensors(model), jnp.bfloat16)
    again = layout.model(layout.tensors(once), jnp.bfloat16)
    for (path, a), (_, b) in zip(
        nnx.to_flat_state(nnx.state(once, nnx.Param)), nnx.to_flat_state(nnx.state(again, nnx.Param))
    ):
        a, b = np.asarray(a.get_value(), np.float32), np.asarray(b.get_value(), np.float32)
        np.testing.assert_allclose(a, b, rtol=2**-7, err_msg=str(path))


def test_gradients_are_those_at_the_rounded_weights(model):
    rounding, plain = ParameterLayout.of(model, "mse"), ParameterLayout.of(model)
    ids = jnp.asarray(np.random.default_rng(0).integers(0, VOCABULARY, (1, 65)), jnp.int32)

    def loss(layout, tensors):
        logits = layout.model(tensors, jnp.float32)(ids[:, :-1])
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), ids[:, 1:, None], axis=-1))

    tensors = rounding.tensors(model)
    rounded = rounding.tensors(rounding.model(tensors, jnp.float32))
    value, got = jax.value_and_grad(lambda t: loss(rounding, t))(tensors)
    expected, want = jax.value_and_grad(lambda t: loss(plain, t))(rounded)
    assert value == pytest.approx(float(expected), rel=1e-6)
    assert abs(float(value) - float(loss(plain, tensors))) > 1e-5
    for name in tensors:
        scale = np.abs(want[name]).max()
        np.testing.assert_allclose(got[name], want[name], rtol=0, atol=1e-5 * scale, err_msg=name)
        assert scale > 0, name


def test_stacked_experts_have_a_global_scale_each():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 4, 32)), jnp.float32)
    x = x * jnp.asarray([1.0, 10.0, 100.0])[:, None, None]
    amax = jnp.max(jnp.abs(x), axis=(-2, -1))
    got = straight_through(x, "mse", amax)
    for one, own in zip(x, got):
        np.testing.assert_array_equal(dequantize(quantize(one, "mse")), own)


def test_routers_gates_and_indexers_are_not_rounded():
    layout = ParameterLayout.of(load_model("tiny-flash-next", "float32"), "mse")
    assert any(name.endswith("mlp.experts.gate_up_proj") for name in layout.rounded)
    assert any("linear_attn.in_proj_qkv" in name for name in layout.rounded)
    for kept in ("mlp.gate.", "shared_expert_gate", "indexer", "in_proj_a", "hyper_connection", "ple", "mtp"):
        assert not [name for name in layout.rounded if kept in name], kept


def test_one_field_of_an_experiment_turns_it_on(prepared):
    trainer = Trainer(small_experiment(model=small_model(), quantize_weights="static_6"), prepared)
    assert trainer.layout.rule == "static_6"
    assert MLP + "down_proj.weight" in trainer.layout.rounded


def test_what_cannot_be_rounded_is_refused(model):
    with pytest.raises(ConfigError, match="quantize_weights is 'int4'; it must be one of none, static_6"):
        dataclasses.replace(small_experiment(), quantize_weights="int4")
    with pytest.raises(ConfigError, match="Bigram has no matrices to quantise"):
        ParameterLayout.of(Bigram(VOCABULARY), "mse")
    narrow = dataclasses.replace(small_model(), intermediate_size=40)
    other = ARCHITECTURES["MiniCPMSALAForCausalLM"].model(narrow, dtype=jnp.float32, rngs=nnx.Rngs(0))
    with pytest.raises(ConfigError, match="down_proj.weight .* has 40 columns, which do not divide"):
        ParameterLayout.of(other, "mse")
