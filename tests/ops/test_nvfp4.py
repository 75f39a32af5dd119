"""Products with NVFP4 weights against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hybridjax.ops import nvfp4_experts, nvfp4_w4a4, nvfp4_w4a16
from hybridjax.ops.nvfp4_experts import choose
from hybridjax.quantization import NVFP4, dequantize, quantize

HIDDEN, WIDTH = 64, 32
FORMS = ["reference", "gather", "blocked", "decoded"]


def normal(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def matrix(seed, rows, columns):
    """A fused matrix: its two halves have global scales of their own."""
    halves = [quantize(normal(seed + i, rows // 2, columns) * 3.0**i) for i in range(2)]
    codes, scales = (jnp.concatenate([getattr(h, name) for h in halves]) for name in ("codes", "scales"))
    exact = np.concatenate([np.asarray(dequantize(h), np.float64) for h in halves])
    return NVFP4(codes, scales, jnp.repeat(jnp.stack([h.global_scale for h in halves]), rows // 2)), exact


@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 1e-6), (jnp.bfloat16, 2**-8)])
@pytest.mark.parametrize("rows", [1, 5])
def test_w4a16_is_the_product_with_the_dequantised_matrix(dtype, tolerance, rows):
    weight, exact = matrix(1, 24, 96)
    x = normal(2, rows, 96, dtype=dtype)
    got = nvfp4_w4a16(x, weight.codes, weight.scales, weight.global_scale)
    assert got.dtype == dtype
    want = np.asarray(x, np.float64) @ exact.T
    np.testing.assert_allclose(
        np.asarray(got, np.float64), want, rtol=tolerance, atol=1e-6 * np.abs(want).max()
    )


def test_w4a16_rounds_once_to_the_dtype_asked_for():
    weight, exact = matrix(1, 24, 96)
    x = normal(2, 3, 96, dtype=jnp.bfloat16)
    got = nvfp4_w4a16(x, weight.codes, weight.scales, weight.global_scale, out_dtype=jnp.float32)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, np.asarray(x, np.float64) @ exact.T, rtol=1e-5, atol=1e-4)


def test_w4a4_clips_beyond_the_calibrated_range_and_is_near_inside():
    weight, exact = matrix(1, 24, 96)
    x = normal(2, 3, 96)
    wide = nvfp4_w4a4(x, weight.codes, weight.scales, weight.global_scale, jnp.abs(x).max() / 2688)
    want = np.asarray(x, np.float64) @ exact.T
    assert 0.01 < np.linalg.norm(wide - want) / np.linalg.norm(want) < 0.2
    narrow = nvfp4_w4a4(x, weight.codes, weight.scales, weight.global_scale, jnp.float32(0.1 / 2688))
    clipped = np.clip(np.asarray(x, np.float64), -0.1, 0.1) @ exact.T
    assert np.linalg.norm(narrow - clipped) / np.linalg.norm(clipped) < 0.2


def stack(seed, count, rows, columns):
    """Experts whose rows each have a global scale of their own, and their float64 values."""
    plain = quantize(0.3 * normal(seed, count, rows, columns))
    scale = plain.global_scale[:, None] * (1 + jnp.arange(rows, dtype=jnp.float32) % 3)
    unit = NVFP4(plain.codes, plain.scales, jnp.ones((count,), jnp.float32))
    exact = np.asarray(dequantize(unit), np.float64) * np.asarray(scale, np.float64)[..., None]
    return NVFP4(plain.codes, plain.scales, scale), exact


def experts_case(seed, rows, count, k, dtype=jnp.float32):
    """Arguments of ``nvfp4_experts`` and what they give in float64."""
    rng = np.random.default_rng(seed)
    (gate_up, wide), (down, narrow) = (
        stack(seed, count, 2 * WIDTH, HIDDEN),
        stack(seed + 9, count, HIDDEN, WIDTH),
    )
    x = normal(seed + 1, rows, HIDDEN, dtype=dtype)
    ids = np.array([rng.permutation(count)[:k] for _ in range(rows)], np.int32)
    ids[rng.random(rows) < 0.2] = -1
    weights = rng.random((rows, k)).astype(np.float32)
    want = np.zeros((rows, HIDDEN))
    for n, row in enumerate(np.asarray(x, np.float64)):
        for weight, e in zip(weights[n], ids[n]):
            if e >= 0:
                gate, up = np.split(wide[e] @ row, 2)
                want[n] += weight * (narrow[e] @ (gate / (1 + np.exp(-gate)) * up))
    return (x, jnp.asarray(ids), jnp.asarray(weights), gate_up, down), want


@pytest.mark.parametrize("implementation", FORMS)
@pytest.mark.parametrize(("rows", "count", "k"), [(1, 5, 3), (40, 4, 2)])
def test_experts_equal_a_float64_loop_over_choices(implementation, rows, count, k):
    args, want = experts_case(3, rows, count, k)
    got = nvfp4_experts(*args, implementation=implementation)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("implementation", FORMS)
def test_bfloat16_is_rounded_only_between_the_products_and_at_the_end(implementation):
    args, want = experts_case(4, 12, 5, 2, jnp.bfloat16)
    got = nvfp4_experts(*args, implementation=implementation)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=2**-8, atol=2**-8 * np.abs(want).max())


@pytest.mark.parametrize("implementation", FORMS)
def test_padding_is_zero_whatever_it_holds(implementation):
    (x, ids, weights, *rest), _ = experts_case(5, 12, 5, 2)
    ids = ids.at[0].set(-1)
    padding = jnp.all(ids < 0, axis=1)[:, None]
    want = nvfp4_experts(x, ids, weights, *rest, implementation=implementation)
    poisoned = jnp.where(padding, jnp.nan, x), ids, jnp.where(padding, jnp.nan, weights)
    got = nvfp4_experts(*poisoned, *rest, implementation=implementation)
    assert not np.asarray(got)[np.asarray(padding)[:, 0]].any()
    np.testing.assert_array_equal(got, want)


def test_a_cpu_decodes_small_experts_at_once_and_others_block_by_block(monkeypatch):
    args, _ = experts_case(5, 12, 5, 2)
    for limit, name in ((2**25, "decoded"), (2**10, "blocked")):
        monkeypatch.setitem(choose.__globals__, "_DECODED_BYTES", limit)
        assert nvfp4_experts.select(*args) == "xla" and choose(*args) == name
        np.testing.assert_array_equal(nvfp4_experts(*args), nvfp4_experts(*args, implementation=name))


def test_gradients_reach_the_activations_of_a_product():
    weight, exact = matrix(1, 24, 96)
    x = normal(2, 3, 96)
    got = jax.grad(lambda x: nvfp4_w4a16(x, weight.codes, weight.scales, weight.global_scale).sum())(x)
    np.testing.assert_allclose(got, np.broadcast_to(exact.sum(axis=0), x.shape), rtol=1e-4, atol=1e-4)
