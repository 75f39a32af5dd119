"""Gradients of the chunked recurrences against those of the recurrences in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from hybridjax.ops import gated_delta_whole, simple_gla_whole
from hybridjax.pallas_kernels import whole

BATCH, LENGTH, HEADS, KEY_HEADS, SCALE = 2, 150, 4, 2, 0.3


def simple_gla_definition(q, k, v, slopes):
    def step(state, token):
        q, k, v = token
        state = jnp.exp(-slopes)[:, None, None] * state + k[..., :, None] * v[..., None, :]
        return state, SCALE * jnp.einsum("bhk,bhkv->bhv", q, state)

    return _scan(step, (q, k, v), v)


def gated_delta_definition(q, k, v, g, beta):
    share = v.shape[2] // k.shape[2]
    q, k = (jnp.repeat(x / jnp.sqrt(jnp.sum(x * x, -1, keepdims=True) + 1e-6), share, axis=2) for x in (q, k))

    def step(state, token):
        q, k, v, g, beta = token
        state = jnp.exp(g)[..., None, None] * state
        delta = beta[..., None] * (v - jnp.einsum("bhk,bhkv->bhv", k, state))
        state = state + k[..., :, None] * delta[..., None, :]
        return state, jnp.einsum("bhk,bhkv->bhv", q, state)

    return _scan(step, (q * q.shape[-1] ** -0.5, k, v, g, beta), v)


def _scan(step, tokens, v):
    zero = jnp.zeros((v.shape[0], v.shape[2], tokens[1].shape[-1], v.shape[3]), v.dtype)
    final, out = jax.lax.scan(step, zero, tuple(jnp.moveaxis(x, 1, 0) for x in tokens))
    return jnp.moveaxis(out, 0, 1), final


def simple_gla_inputs(size):
    rng = np.random.default_rng(3)
    rows = [rng.standard_normal((BATCH, LENGTH, HEADS, size)) for _ in range(3)]
    return [*rows, np.array([0.9, 0.2, 0.03, 0.0])]


def gated_delta_inputs(size):
    rng = np.random.default_rng(4)
    rows = [rng.standard_normal((BATCH, LENGTH, heads, size)) for heads in (KEY_HEADS, KEY_HEADS, HEADS)]
    g, beta = (rng.uniform(size=(BATCH, LENGTH, HEADS)) for _ in range(2))
    return [*rows, -0.3 * g, beta]


CASES = {
    "simple_gla": (
        simple_gla_inputs,
        simple_gla_definition,
        functools.partial(simple_gla_whole, scale=SCALE, implementation="xla"),
    ),
    "gated_delta": (
        gated_delta_inputs,
        gated_delta_definition,
        functools.partial(gated_delta_whole, implementation="xla"),
    ),
}


def loss(function, arrays):
    out, final = function(*arrays)
    return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(final))


@pytest.mark.parametrize("op", CASES)
def test_gradients_equal_those_of_the_float64_recurrence(op):
    make, definition, chunked = CASES[op]
    arrays = [x.astype(np.float32) for x in make(8)]
    got = jax.jit(jax.grad(functools.partial(loss, chunked)))(arrays)
    with jax.enable_x64(True):
        want = jax.jit(jax.grad(functools.partial(loss, definition)))([x.astype(np.float64) for x in arrays])
        assert all(x.dtype == np.float64 for x in want)
    for number, (x, y) in enumerate(zip(got, want, strict=True)):
        np.testing.assert_allclose(x, y, rtol=0, atol=2e-5 * np.abs(y).max(), err_msg=str(number))


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the kernels are interpreted here")
@pytest.mark.parametrize("op", CASES)
def test_a_forward_pass_by_a_kernel_has_the_gradients_of_the_chunked_form(op):
    """Only the losses' cotangents differ, by the rounding of the kernel's outputs."""
    make, _, chunked = CASES[op]
    arrays = [jnp.asarray(x[:1, :70] if x.ndim > 1 else x) for x in make(128)]
    arrays = [x.astype(jnp.bfloat16 if x.ndim == 4 else jnp.float32) for x in arrays]
    options = {"scale": SCALE} if op == "simple_gla" else {}
    kernel = functools.partial(getattr(whole, op), interpret=plgpu.InterpretGPUParams(), **options)
    weight = np.random.default_rng(0).standard_normal((1, 70, HEADS, 128)).astype(np.float32)

    def linear(function, arrays):
        out, final = function(*arrays)
        return jnp.sum(weight * out) + jnp.sum(final)

    got = jax.grad(functools.partial(linear, kernel))(arrays)
    want = jax.grad(functools.partial(linear, chunked))(arrays)
    for x, y in zip(got, want, strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_allclose(x.astype(np.float32), y.astype(np.float32), rtol=1e-2, atol=1e-4)
    for x, y in zip(kernel(*arrays), chunked(*arrays), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-2 * float(np.abs(y).max()))
