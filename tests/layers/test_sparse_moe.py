"""The mixture of experts against transformers' block on the same weights, and its handling of padding."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from hybridjax.batch import Batch
from hybridjax.configs import Qwen4ExpConfig
from hybridjax.layers import SparseMoE
from hybridjax.ops import load_balancing_loss, override, route

GOLDEN = Path(__file__).parent.parent / "goldens" / "qwen4_exp" / "sparse_moe.safetensors"
CONFIG = dataclasses.replace(
    Qwen4ExpConfig(),
    hidden_size=16,
    num_experts=6,
    num_experts_per_tok=3,
    moe_intermediate_size=8,
    shared_expert_intermediate_size=12,
)


@pytest.fixture(scope="module")
def golden():
    return {name: jnp.asarray(value) for name, value in load_file(GOLDEN).items()}


@pytest.fixture(scope="module")
def moe(golden):
    made = SparseMoE(CONFIG, init=jax.nn.initializers.zeros, dtype=jnp.float32, rngs=nnx.Rngs(0))
    gate, up = golden["shared_expert.gate_proj.weight"], golden["shared_expert.up_proj.weight"]
    for param, value in (
        (made.gate.weight.value, golden["gate.weight"]),
        (made.experts.gate_up, golden["experts.gate_up_proj"]),
        (made.experts.down, golden["experts.down_proj"]),
        (made.shared.gate_up.weight.value, jnp.concatenate([gate, up])),
        (made.shared.down.weight.value, golden["shared_expert.down_proj.weight"]),
        (made.shared_gate.weight.value, golden["shared_expert_gate.weight"]),
    ):
        assert param.shape == value.shape
        param.set_value(value)
    return made


@pytest.mark.parametrize("implementation", ["reference", "dense", "blocked"])
def test_outputs_and_choices_are_those_of_transformers(moe, golden, implementation):
    seen = {}
    with override(f"experts={implementation}"):
        y = moe(golden["x"], probe=seen.__setitem__)
    np.testing.assert_array_equal(seen["expert_ids"], golden["ids"])
    np.testing.assert_allclose(y, golden["y"], rtol=2e-5, atol=2e-5)


def test_balancing_losses_are_those_of_transformers(moe, golden):
    def routed(x):
        seen = {}
        moe(x, probe=seen.__setitem__)
        return seen["router_probs"], seen["expert_ids"]

    (probs, ids), (more, others) = routed(golden["x"]), routed(golden["x2"])
    mask = golden["mask"] > 0
    got = [
        load_balancing_loss(probs, ids, jnp.ones_like(mask)),
        load_balancing_loss(probs, ids, mask),
        load_balancing_loss(
            jnp.concatenate([probs, more]), jnp.concatenate([ids, others]), jnp.concatenate([mask, mask])
        ),
    ]
    np.testing.assert_allclose(got, golden["loss"], rtol=1e-6)


def test_padding_goes_to_no_expert_and_changes_nobody(moe, golden):
    batch = Batch.whole(jnp.zeros((1, 40), jnp.int32))
    x = jnp.concatenate([golden["x"], jnp.full((24, 16), jnp.nan)])
    seen = {}
    y = moe(x, batch, probe=seen.__setitem__)
    np.testing.assert_array_equal(seen["expert_ids"][40:], np.full((24, 3), -1))
    np.testing.assert_allclose(y[:40], golden["y"], rtol=2e-5, atol=2e-5)


def test_the_router_learns_from_outputs_and_from_the_balancing_loss(moe, golden):
    graph, state = nnx.split(moe)

    def balance(state):
        seen = {}
        nnx.merge(graph, state)(golden["x"], probe=seen.__setitem__)
        valid = jnp.ones(seen["expert_ids"].shape[0], bool)
        return load_balancing_loss(seen["router_probs"], seen["expert_ids"], valid)

    def fit(state):
        return jnp.sum(nnx.merge(graph, state)(golden["x"]) ** 2)

    for loss in (balance, fit):
        value, gradient = jax.jit(jax.value_and_grad(loss))(state)
        gate = gradient["gate"]["weight"]["value"][...]
        # A small step against the gradient lowers the loss by step * |gradient|^2.
        squared = sum(float(jnp.sum(g**2)) for g in jax.tree.leaves(gradient))
        step = 1e-4 * float(value) / squared
        moved = jax.tree.map(lambda p, g, step=step: p - step * g, state, gradient)
        assert float(jnp.abs(gate).max()) > 0
        assert float(loss(moved)) == pytest.approx(float(value) * (1 - 1e-4), rel=2e-5)


def test_bfloat16_layers_route_by_float32_logits(moe, golden):
    low = SparseMoE(CONFIG, init=jax.nn.initializers.zeros, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    cast = jax.tree.map(lambda x: x.astype(jnp.bfloat16), nnx.state(moe))
    nnx.update(low, cast)
    seen, x = {}, golden["x"].astype(jnp.bfloat16)
    y = low(x, probe=seen.__setitem__)
    assert y.dtype == jnp.bfloat16 and seen["router_probs"].dtype == jnp.float32
    logits = x.astype(jnp.float32) @ cast["gate"]["weight"]["value"][...].astype(jnp.float32).T
    np.testing.assert_array_equal(seen["expert_ids"], route(logits, 3, True)[0])
    np.testing.assert_allclose(y.astype(jnp.float32), golden["y"], atol=0.1, rtol=0.05)
