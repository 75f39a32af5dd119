"""Routed experts against a float64 loop over choices, and the router against its definition."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import mosaic_gpu as plgpu

from hybridjax.ops import experts, load_balancing_loss, route
from hybridjax.ops.experts import block_size, choose, lay_out
from hybridjax.pallas_kernels.experts import hopper

HIDDEN, WIDTH = 12, 6
XLA = ["reference", "dense", "gather", "blocked", "ragged"]


def oracle(x, ids, weights, gate_up, down):
    x, weights, gate_up, down = (np.asarray(t, np.float64) for t in (x, weights, gate_up, down))
    out = np.zeros_like(x)
    for n, row in enumerate(np.asarray(ids)):
        for j, e in enumerate(row):
            if e >= 0:
                gate, up = np.split(gate_up[e] @ x[n], 2)
                out[n] += weights[n, j] * (down[e] @ (gate / (1 + np.exp(-gate)) * up))
    return out


def inputs(seed, rows, count, k, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.standard_normal((rows, HIDDEN)), dtype)
    gate_up = jnp.asarray(0.3 * rng.standard_normal((count, 2 * WIDTH, HIDDEN)), dtype)
    down = jnp.asarray(0.3 * rng.standard_normal((count, HIDDEN, WIDTH)), dtype)
    ids = np.array([rng.permutation(count)[:k] for _ in range(rows)], np.int32)
    ids[rng.random(rows) < 0.2] = -1
    weights = jnp.asarray(rng.random((rows, k)), jnp.float32)
    return x, jnp.asarray(ids), weights, gate_up, down


@pytest.mark.parametrize("implementation", XLA)
@pytest.mark.parametrize(("rows", "count", "k"), [(1, 5, 1), (7, 40, 3), (64, 6, 4), (150, 3, 2)])
def test_experts_equal_a_float64_loop_over_choices(implementation, rows, count, k):
    args = inputs(rows, rows, count, k)
    got = experts(*args, implementation=implementation)
    np.testing.assert_allclose(got, oracle(*args), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", XLA)
def test_bfloat16_is_rounded_only_between_the_products_and_at_the_end(implementation):
    args = inputs(3, 20, 8, 4, jnp.bfloat16)
    got = experts(*args, implementation=implementation)
    assert got.dtype == jnp.bfloat16
    want = oracle(*args)
    # 2^-9 of the result from its own rounding, and as much of the activations.
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=2**-8, atol=2**-8 * np.abs(want).max())


@pytest.mark.parametrize("implementation", XLA)
def test_padding_rows_are_zero_whatever_they_hold(implementation):
    x, ids, weights, gate_up, down = inputs(5, 30, 6, 2)
    padding = np.asarray(ids[:, 0]) < 0
    ids = ids.at[0].set(-1)
    padding[0] = True
    mask = jnp.asarray(padding)[:, None]
    want = experts(x, ids, weights, gate_up, down, implementation=implementation)
    x, weights = jnp.where(mask, jnp.nan, x), jnp.where(mask, jnp.nan, weights)
    got = experts(x, ids, weights, gate_up, down, implementation=implementation)
    assert not np.asarray(got)[padding].any()
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("implementation", XLA)
def test_nothing_but_padding_is_all_zero(implementation):
    x, ids, weights, gate_up, down = inputs(5, 9, 6, 2)
    got = experts(x, jnp.full_like(ids, -1), weights, gate_up, down, implementation=implementation)
    np.testing.assert_array_equal(got, np.zeros_like(x))


@pytest.mark.parametrize("implementation", ["dense", "gather", "blocked", "ragged"])
@pytest.mark.parametrize(("rows", "count"), [(6, 9), (70, 4)])
def test_gradients_equal_those_of_the_definition(implementation, rows, count):
    x, ids, weights, gate_up, down = inputs(11, rows, count, 3)

    def loss(name):
        def value(x, weights, gate_up, down):
            return jnp.sum(jnp.sin(experts(x, ids, weights, gate_up, down, implementation=name)))

        return jax.jit(jax.grad(value, argnums=(0, 1, 2, 3)))(x, weights, gate_up, down)

    for got, want in zip(loss(implementation), loss("reference"), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_blocked_rows_do_not_depend_on_the_rest_of_the_batch():
    x, ids, weights, gate_up, down = inputs(2, 40, 7, 3)
    run = jax.jit(lambda *args: experts(*args, implementation="blocked"))
    want = run(x, ids, weights, gate_up, down)
    for keep in (0, 13, 39):
        alone = jnp.where(jnp.arange(40)[:, None] == keep, ids, -1)
        np.testing.assert_array_equal(run(x, alone, weights, gate_up, down)[keep], want[keep])


def test_no_choice_is_dropped_when_all_rows_want_the_same_expert():
    x, _, _, gate_up, down = inputs(4, 200, 16, 1)
    ids, weights = jnp.full((200, 1), 15, jnp.int32), jnp.ones((200, 1))
    got = experts(x, ids, weights, gate_up, down, implementation="blocked")
    np.testing.assert_allclose(got, oracle(x, ids, weights, gate_up, down), rtol=1e-5, atol=1e-5)


@settings(max_examples=60)
@given(
    ids=st.lists(st.lists(st.integers(-1, 4), min_size=2, max_size=2), min_size=1, max_size=24),
    size=st.sampled_from([1, 2, 8]),
    pairwise=st.booleans(),
)
def test_the_layout_has_one_expert_per_block_and_a_place_for_each_choice(ids, size, pairwise):
    ids = np.array(ids, np.int32)
    padded = np.pad(ids, ((0, 24 - len(ids)), (0, 0)), constant_values=-1)
    made = _LAY_OUT(jnp.asarray(padded), size, pairwise)
    row, expert, place = np.asarray(made.row), np.asarray(made.expert), np.asarray(made.place)
    places = []
    for n, choices in enumerate(ids):
        for j, e in enumerate(choices):
            if e >= 0:
                block, column = divmod(int(place[n, j]), size)
                assert block < made.active
                assert expert[block] == e and row[block, column] == n
                places.append((block, column))
    assert len(set(places)) == len(places)
    counts = np.bincount(ids[ids >= 0], minlength=5)
    assert made.active == sum(-(-counts // size)) <= len(expert)


_LAY_OUT = jax.jit(lambda ids, size, pairwise: lay_out(ids, 5, size, pairwise), static_argnums=(1, 2))


def test_blocks_are_about_as_long_as_what_an_expert_gets():
    assert [block_size(n, 512) for n in (10, 512, 513, 5120, 20480, 10**6)] == [1, 1, 2, 16, 64, 64]


def test_the_automatic_choice_on_a_cpu_is_blocked():
    args = inputs(0, 64, 16, 4)
    assert experts.select(*args) == "automatic" and choose(*args) == "blocked"
    np.testing.assert_array_equal(experts(*args), experts(*args, implementation="blocked"))


@pytest.mark.parametrize(
    ("hopper", "rows", "want"),
    [
        (True, 1, "gather"),
        (True, 19, "gather"),
        (True, 20, "mosaic_gpu"),
        (True, 4096, "mosaic_gpu"),
        (False, 51, "gather"),
        (False, 52, "dense"),
        (False, 2048, "blocked"),
    ],
)
def test_the_automatic_choice_on_gpus_follows_choices_per_expert(monkeypatch, hopper, rows, want):
    module = importlib.import_module("hybridjax.ops.experts")
    monkeypatch.setattr(module, "platform", lambda: "gpu")
    monkeypatch.setattr(module, "_hopper", lambda *args: hopper)
    shapes = ((rows, 2560), (rows, 10), (rows, 10), (512, 1280, 2560), (512, 2560, 640))
    assert choose(*(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)) == want


@pytest.mark.parametrize(("hidden", "width"), [(128, 64), (64, 192)])
def test_the_gpu_kernel_equals_the_definition_when_interpreted(hidden, width):
    rng = np.random.default_rng(0)
    x, gate_up, down = (
        jnp.asarray(rng.standard_normal(shape) * scale, jnp.bfloat16)
        for shape, scale in (((40, hidden), 1), ((3, 2 * width, hidden), 0.1), ((3, hidden, width), 0.1))
    )
    # Expert 2 gets 68 choices, two blocks of 64; expert 0 none.
    ids = jnp.where(jnp.arange(40)[:, None] < 6, -1, jnp.asarray([[2, 2]], jnp.int32)).at[0, 1].set(1)
    weights = jnp.asarray(rng.random((40, 2)), jnp.float32)
    args = (x, ids, weights, gate_up, down)
    got = hopper.apply(*args, interpret=plgpu.InterpretGPUParams(detect_races=True))
    want = oracle(*args)
    assert not np.asarray(got[1:6], np.float32).any()
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=2**-7, atol=2**-8 * np.abs(want).max())


@pytest.mark.parametrize("normalise", [True, False])
def test_route_takes_the_most_probable_of_all_experts(normalise):
    logits = np.random.default_rng(0).standard_normal((50, 20)).astype(np.float32)
    ids, weights = route(jnp.asarray(logits), 4, normalise)
    assert ids.dtype == jnp.int32 and weights.dtype == jnp.float32
    probs = np.exp(logits.astype(np.float64))
    probs /= probs.sum(axis=1, keepdims=True)
    want = np.argsort(-probs, axis=1)[:, :4]
    np.testing.assert_array_equal(ids, want)
    chosen = np.take_along_axis(probs, want, axis=1)
    np.testing.assert_allclose(
        weights, chosen / chosen.sum(axis=1, keepdims=True) if normalise else chosen, rtol=1e-5
    )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_ties_go_to_the_lower_expert(dtype):
    logits = jnp.asarray([[0, 1, 1, 1, 0, 1], [2, 2, 2, 2, 2, 2]], dtype)
    ids, weights = route(logits, 3, True)
    np.testing.assert_array_equal(ids, [[1, 2, 3], [0, 1, 2]])
    np.testing.assert_allclose(weights, np.full((2, 3), 1 / 3), rtol=1e-6)


def test_the_balancing_loss_of_even_routing_is_k_and_ignores_padding():
    probs = jnp.full((8, 4), 0.25)
    ids = jnp.asarray([[0, 1], [2, 3]] * 4, jnp.int32)
    assert load_balancing_loss(probs, ids, jnp.ones(8, bool)) == pytest.approx(2.0)
    valid = jnp.arange(8) < 6
    poisoned = jnp.where(valid[:, None], probs, jnp.nan)
    assert load_balancing_loss(poisoned, jnp.where(valid[:, None], ids, -1), valid) == pytest.approx(2.0)
    assert load_balancing_loss(probs, ids, jnp.zeros(8, bool)) == 0.0


def test_the_balancing_loss_of_one_expert_for_all_is_the_number_of_experts():
    probs = jnp.zeros((5, 4)).at[:, 2].set(1.0)
    assert load_balancing_loss(probs, jnp.full((5, 1), 2, jnp.int32), jnp.ones(5, bool)) == pytest.approx(4.0)
