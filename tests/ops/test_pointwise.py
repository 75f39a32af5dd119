"""Norms, gates and rotary embedding against float64 formulas."""

import jax.numpy as jnp
import numpy as np
import pytest

from hybridjax.ops import gated, rms_norm, rotary, swiglu


def draw(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def test_rms_norm_equals_the_formula():
    x, w = draw(5, 12), draw(12, seed=1)
    want = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * w
    got = rms_norm(jnp.asarray(x, jnp.float32), jnp.asarray(w, jnp.float32), eps=1e-6)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_rms_norm_rounds_before_it_multiplies_by_the_weight():
    x = jnp.asarray(draw(64, 16), jnp.bfloat16)
    w = jnp.asarray(1 + 0.01 * draw(16, seed=1), jnp.bfloat16)
    wide = np.asarray(x, np.float64)
    normed = jnp.asarray(wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6), jnp.bfloat16)
    np.testing.assert_array_equal(rms_norm(x, w, eps=1e-6), normed * w)


def test_gate_and_swiglu_equal_their_formulas():
    x, g = draw(4, 6), draw(4, 6, seed=1)
    np.testing.assert_allclose(gated(jnp.asarray(x), jnp.asarray(g)), x / (1 + np.exp(-g)), rtol=1e-5)
    both = jnp.asarray(np.concatenate([g, x], -1))
    np.testing.assert_allclose(swiglu(both), g / (1 + np.exp(-g)) * x, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("theta", [10000.0, 1e6])
def test_rotary_turns_each_pair_by_its_angle(theta):
    x, positions = draw(3, 2, 8), np.array([0, 1, 4000])
    got = rotary(jnp.asarray(x, jnp.float32), jnp.asarray(positions, jnp.int32), theta=theta)
    for n, position in enumerate(positions):
        for j in range(4):
            angle = position * theta ** (-2 * j / 8)
            turned = (x[n, :, j] + 1j * x[n, :, j + 4]) * np.exp(1j * angle)
            np.testing.assert_allclose(got[n, :, j], turned.real, rtol=1e-3, atol=2e-3)
            np.testing.assert_allclose(got[n, :, j + 4], turned.imag, rtol=1e-3, atol=2e-3)


def test_rotary_products_depend_on_distance_only():
    q, k = draw(1, 1, 16), draw(1, 1, 16, seed=1)

    def product(a, b):
        turn = [
            rotary(jnp.asarray(x, jnp.float32), jnp.array([p], jnp.int32), theta=1e4)
            for x, p in ((q, a), (k, b))
        ]
        return float(jnp.sum(turn[0] * turn[1]))

    assert product(7, 3) == pytest.approx(product(104, 100), abs=1e-4)
