"""NVFP4 against its authors' reference, the tables of its formats, and properties."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from hybridjax.checkpoints.safetensors_file import SafetensorsFile
from hybridjax.quantization import (
    GROUP,
    RULES,
    block_scales,
    decode,
    dequantize,
    encode,
    from_words,
    global_scale,
    pack,
    quantize,
    quantize_activations,
    round_stochastically,
    swizzle_scales,
    to_words,
    unpack,
    unswizzle_scales,
)

GOLDENS = Path(__file__).parents[1] / "goldens/nvfp4"
SOURCES = ("normal", "heavy_tail", "tiny", "zero_block")
VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
quantized = jax.jit(quantize, static_argnames="rule")


@pytest.fixture(scope="module")
def goldens():
    return SafetensorsFile(GOLDENS / "quantize.safetensors")


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("rule", ["static_6", "mse", "mae", "abs_max"])
@pytest.mark.parametrize("function", [quantize, quantized], ids=["eager", "jit"])
def test_the_authors_reference_bit_by_bit(goldens, source, rule, function):
    x = jnp.asarray(goldens.read(f"{source}.weight_source"))
    got = function(x, rule=rule)
    want = {name: goldens.read(f"{source}.{rule}.weight{name}") for name in ("", "_scale", "_scale_2")}
    np.testing.assert_array_equal(np.asarray(got.scales).view(np.uint8), want["_scale"].view(np.uint8))
    assert np.asarray(got.global_scale) == want["_scale_2"]
    # The two zeros, codes 0 and 8, are one value.
    np.testing.assert_array_equal(unpack(got.codes), unpack(jnp.asarray(want[""])))
    nonzero = np.asarray(unpack(got.codes)) != 0
    both = np.stack([np.asarray(got.codes) & 15, np.asarray(got.codes) >> 4], -1).reshape(x.shape)
    theirs = np.stack([want[""] & 15, want[""] >> 4], -1).reshape(x.shape)
    np.testing.assert_array_equal(both[nonzero], theirs[nonzero])
    error = np.linalg.norm(np.asarray(dequantize(got), np.float64) - x) / np.linalg.norm(np.float64(x))
    known = json.loads((GOLDENS / "quantize.json").read_text())["relative_error"][f"{source}.{rule}"]
    assert error == pytest.approx(known, rel=1e-5)


def test_every_code_and_its_place_in_a_byte():
    codes = jnp.arange(256, dtype=jnp.uint8)[:, None]
    np.testing.assert_array_equal(unpack(codes)[:, 0], VALUES[np.arange(256) & 15])
    np.testing.assert_array_equal(unpack(codes)[:, 1], VALUES[np.arange(256) >> 4])
    np.testing.assert_array_equal(pack(unpack(codes).astype(jnp.float4_e2m1fn)), codes)


def test_every_code_times_every_scale_is_exact_in_16_bits():
    scales = np.arange(0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
    codes = jnp.asarray(np.tile(np.arange(8, dtype=np.uint8) * 0x22 + 0x10, (len(scales), 1)))
    got = decode(codes, jnp.asarray(scales)[:, None])
    want = np.asarray(unpack(codes), np.float64) * scales.astype(np.float64)[:, None]
    np.testing.assert_array_equal(got, want)
    for dtype in (jnp.bfloat16, jnp.float16):
        np.testing.assert_array_equal(got.astype(dtype).astype(jnp.float32), want)


def test_ties_go_to_the_even_code():
    x = np.zeros((1, GROUP), np.float32)
    x[0, :7] = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5]
    x[0, 7:14] = -x[0, :7]
    one = jnp.ones((1, 1), jnp.float8_e4m3fn)
    got = encode(jnp.asarray(x), one, jnp.float32(1)).astype(jnp.float32)
    near = [0, 1, 1, 2, 2, 4, 4]
    np.testing.assert_array_equal(got[0, :14], near + [-v for v in near])


FINITE = st.floats(-(2.0**100), 2.0**100, width=32)


@given(
    x=arrays.arrays(np.float32, (2, 32), elements=FINITE),
    rule=st.sampled_from(RULES),
)
def test_no_value_is_further_off_than_half_a_step(x, rule):
    got = quantized(jnp.asarray(x), rule=rule)
    scales = np.asarray(got.scales).astype(np.float64)
    assert np.isfinite(scales).all() and (scales >= 0).all() and np.isfinite(float(got.global_scale))
    step = np.repeat(scales * float(got.global_scale), GROUP, axis=1)
    near, exact = np.asarray(dequantize(got), np.float64), np.float64(x)
    inside = (np.abs(exact) <= 6 * step) & (step > 1e-37)
    gap = np.where(np.abs(exact) <= 2 * step, 0.25, np.where(np.abs(exact) <= 4 * step, 0.5, 1.0)) * step
    assert (np.abs(near - exact)[inside] <= gap[inside] * (1 + 1e-6)).all()


@given(x=arrays.arrays(np.float32, (3, 48), elements=st.floats(-100, 100, width=32)))
def test_an_adaptive_rule_is_never_worse_than_its_own_largest_code_of_6(x):
    amax = jnp.asarray(np.abs(x).max())
    if not amax > 0:
        return
    scale = global_scale(amax, "mse")
    chosen = block_scales(jnp.asarray(x), amax[None, None], "mse")
    six = (np.abs(x).reshape(3, 3, GROUP).max(-1) / 6 * (1536 / np.float32(amax))).astype(
        ml_dtypes.float8_e4m3fn
    )

    def error(scales):
        near = encode(jnp.asarray(x), jnp.asarray(scales), scale).astype(jnp.float32).reshape(3, 3, GROUP)
        step = np.asarray(scales).astype(np.float64)[..., None] * float(scale)
        return ((np.float64(near) * step - x.reshape(3, 3, GROUP)) ** 2).sum(-1)

    assert (error(chosen) <= error(six) * (1 + 1e-5) + 1e-30).all()


@pytest.mark.parametrize("rule", ["mse", "mae", "abs_max"])
@pytest.mark.parametrize("exponent", [-100, -60, 60, 126])
def test_the_choice_does_not_depend_on_the_unit(rule, exponent):
    x = jnp.asarray(np.random.default_rng(0).uniform(-1.9, 1.9, (16, 64)).astype(np.float32))
    once, scaled = quantized(x, rule=rule), quantized(x * np.float32(2.0**exponent), rule=rule)
    np.testing.assert_array_equal(np.asarray(scaled.scales, np.float32), np.asarray(once.scales, np.float32))
    np.testing.assert_array_equal(scaled.codes, once.codes)
    chose_4 = np.asarray(once.scales, np.float32) != np.asarray(
        block_scales(x, jnp.max(jnp.abs(x))[None, None], "static_6"), np.float32
    )
    assert chose_4.any()


def test_fused_matrices_share_a_global_scale():
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((2, 8, 32), np.float32) * np.array([1, 5], np.float32)[:, None, None])
    amax = jnp.max(jnp.abs(x))
    apart = quantize(x, "mse", jnp.stack([amax, amax]))
    whole = quantize(x.reshape(16, 32), "mse")
    np.testing.assert_array_equal(dequantize(apart).reshape(16, 32), dequantize(whole))


def test_activations_under_a_calibrated_scale():
    x = jnp.asarray(np.random.default_rng(1).standard_normal((5, 64), np.float32))
    scale = jnp.float32(float(jnp.max(jnp.abs(x))) / 2688)
    codes, scales = quantize_activations(x, scale)
    plain = quantize(x, "static_6")
    np.testing.assert_array_equal(scales, plain.scales)
    np.testing.assert_array_equal(codes, unpack(plain.codes).astype(jnp.float4_e2m1fn))
    # What is larger than anything in the calibration is clipped, never NaN.
    codes, scales = quantize_activations(x * 1000, scale)
    near = codes.astype(jnp.float32) * jnp.repeat(scales.astype(jnp.float32), GROUP, axis=1) * scale
    assert np.isfinite(near).all()
    assert float(jnp.max(jnp.abs(near))) == pytest.approx(6 * 448 * float(scale))


def test_stochastic_rounding_is_right_on_average():
    x = jnp.asarray(np.random.default_rng(2).uniform(-6, 6, (1, 32)).astype(np.float32))
    one, keys = jnp.ones((1, 2), jnp.float8_e4m3fn), jax.random.split(jax.random.key(0), 4000)
    draw = jax.jit(jax.vmap(lambda key: round_stochastically(x, one, jnp.float32(1), key)))
    drawn = np.asarray(draw(keys).astype(jnp.float32), np.float64)[:, 0]
    assert set(np.unique(drawn)) <= set(VALUES.tolist())
    # A draw's deviation is at most half a gap of 2, so the mean's is 1 / sqrt(4000) at most.
    np.testing.assert_allclose(drawn.mean(0), x[0], atol=5 / 4000**0.5)
    below, above = drawn.min(0), drawn.max(0)
    assert (below <= x[0]).all() and (above >= x[0]).all() and (above - below <= 2).all()


@pytest.mark.parametrize(("rows", "columns"), [(128, 4), (1, 1), (200, 7), (300, 16)])
def test_the_swizzle_puts_each_scale_where_the_tensor_cores_look(rows, columns):
    scales = np.random.default_rng(0).integers(1, 200, (rows, columns), dtype=np.uint8)
    got = np.asarray(swizzle_scales(jnp.asarray(scales)))
    flat, wide = got.reshape(-1), -(-columns // 4) * 4
    for m in range(rows):
        for c in range(columns):
            offset = ((m // 128) * (wide // 4) + c // 4) * 512 + (m % 32) * 16 + ((m % 128) // 32) * 4 + c % 4
            assert flat[offset] == scales[m, c]
    assert np.count_nonzero(flat) == scales.size
    np.testing.assert_array_equal(unswizzle_scales(jnp.asarray(got), rows, columns), scales)


@pytest.mark.parametrize(
    ("columns", "rule", "problem"), [(24, "mse", "multiple of 16"), (32, "mean", "rule is 'mean'; allowed")]
)
def test_what_cannot_be_rounded_is_refused(columns, rule, problem):
    with pytest.raises(ValueError, match=problem):
        quantize(jnp.ones((2, columns)), rule)


def test_zeros_stay_zeros():
    got = quantize(jnp.zeros((2, 32)), "mse")
    assert float(got.global_scale) == 1
    np.testing.assert_array_equal(dequantize(got), np.zeros((2, 32)))


def test_what_does_not_fit_together_is_not_decoded():
    codes, scales = jnp.zeros((3, 16), jnp.uint8), jnp.ones((3, 2), jnp.float8_e4m3fn)
    for wrong in (scales[:1], scales[:, :1]):  # both would broadcast
        with pytest.raises(
            ValueError, match="of 32 columns and scales .* do not fit: there must be one scale"
        ):
            decode(codes, wrong)
    with pytest.raises(ValueError, match="scales are uint8; view them as float8_e4m3fn"):
        decode(codes, scales.view(jnp.uint8))
    with pytest.raises(ValueError, match="codes are int32; they must be uint8 or, arranged as words, uint32"):
        decode(codes.astype(jnp.int32), scales)


def test_no_rows():
    held = quantize(jnp.ones((2, 32)))
    codes, scales = held.codes[:0], held.scales[:0]
    assert decode(codes, scales).shape == decode(to_words(codes), scales).shape == (0, 32)
    assert from_words(to_words(codes)).shape == codes.shape
    rounded, blocks = quantize_activations(jnp.zeros((0, 32)), jnp.float32(1))
    assert pack(rounded).shape == (0, 16) and blocks.shape == (0, 2)
