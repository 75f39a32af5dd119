"""Layers with NVFP4 weights: W4A16, W4A4 and the choice between them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from hybridjax.errors import ConfigError
from hybridjax.layers.linear import DenseWeight
from hybridjax.layers.quantized import NVFP4Experts, NVFP4Weight, SplitWeight, arrange, set_activations
from hybridjax.ops import nvfp4_w4a4
from hybridjax.ops.dispatch import assume
from hybridjax.quantization import GROUP, dequantize, from_words, quantize
from hybridjax.quantization.dispatch import activation_format, crossover

HALF = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def filled(shape: tuple[int, int], calibrated: bool = True, seed: int = 0) -> tuple[NVFP4Weight, np.ndarray]:
    """A weight of random values, and these values in float64."""
    x = jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)
    held, weight = quantize(x, "mse"), NVFP4Weight(shape, calibrated=calibrated)
    weight.codes.set_value(held.codes)
    weight.scales.set_value(held.scales)
    weight.global_scale.set_value(jnp.full(shape[0], held.global_scale))
    return weight, np.asarray(dequantize(held), np.float64)


def rounded(x: np.ndarray, input_scale: float) -> np.ndarray:
    """Activations in NVFP4 as minicpm_sala 4.1 says, value by value, in float64."""
    import ml_dtypes

    out = np.zeros(x.shape)
    for row in range(x.shape[0]):
        for start in range(0, x.shape[1], GROUP):
            block = x[row, start : start + GROUP].astype(np.float64)
            scale = np.float32(np.abs(block).max() / 6 / input_scale)
            scale = float(min(scale, np.float32(448)).astype(ml_dtypes.float8_e4m3fn))
            for i, value in enumerate(block):
                size = abs(value) / (scale * input_scale) if scale else 0.0
                near = HALF[np.argmin(np.abs(HALF - min(size, 6)))]
                out[row, start + i] = np.copysign(near * scale * input_scale, value)
    return out


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_w4a16_multiplies_by_the_decoded_weight(dtype):
    weight, values = filled((24, 64))
    x = jnp.asarray(np.random.default_rng(1).standard_normal((2, 3, 64)), dtype)
    want = np.asarray(x, np.float64) @ values.T
    np.testing.assert_allclose(weight.matmul(x, jnp.dtype(jnp.float32)), want, rtol=0, atol=2e-5)
    got = weight.matmul(x)
    assert got.dtype == dtype and got.shape == (2, 3, 24)


def test_w4a4_rounds_the_activations_too():
    weight, values = filled((24, 64))
    x = np.random.default_rng(1).standard_normal((5, 64)).astype(np.float32)
    scale = np.abs(x).max() / 2688
    weight.input_scale.set_value(jnp.asarray([scale], jnp.float32))
    weight.activations = "w4a4"
    want = rounded(x, float(np.float32(scale))) @ values.T
    np.testing.assert_allclose(weight.matmul(jnp.asarray(x)), want, rtol=0, atol=2e-5)
    assert np.abs(want - x.astype(np.float64) @ values.T).max() > 0.05


def test_the_block_scaled_product_is_the_emulated_one():
    """On a CPU XLA decodes what a Blackwell GPU multiplies as it is."""
    weight, _ = filled((32, 128))
    x = jnp.asarray(np.random.default_rng(1).standard_normal((4, 128)), jnp.float32)
    arguments = x, weight.codes[...], weight.scales[...], weight.global_scale[...], jnp.float32(0.002)
    want = nvfp4_w4a4(*arguments, implementation="reference")
    from hybridjax.ops.nvfp4 import _w4a4_block_scaled

    np.testing.assert_allclose(_w4a4_block_scaled(*arguments), want, rtol=0, atol=2e-5)


def test_the_largest_input_scale_of_a_fused_weight_counts():
    weight, _ = filled((24, 64))
    weight.input_scale = nnx.Param(jnp.asarray([0.001, 0.004, 0.002], jnp.float32))
    single, _ = filled((24, 64))
    single.input_scale.set_value(jnp.asarray([0.004], jnp.float32))
    weight.activations = single.activations = "w4a4"
    x = jnp.asarray(np.random.default_rng(1).standard_normal((5, 64)), jnp.float32)
    np.testing.assert_array_equal(weight.matmul(x), single.matmul(x))


def test_a_split_weight_stacks_its_parts():
    upper, values = filled((24, 64))
    lower = DenseWeight(
        (8, 64), init=nnx.initializers.normal(1), dtype=jnp.dtype(jnp.float32), rngs=nnx.Rngs(0)
    )
    split = SplitWeight([upper, lower])
    x = jnp.asarray(np.random.default_rng(1).standard_normal((5, 64)), jnp.float32)
    both = np.concatenate([values, np.asarray(lower.value[...], np.float64)])
    assert split.shape == (32, 64)
    np.testing.assert_allclose(split.matmul(x), np.asarray(x, np.float64) @ both.T, rtol=0, atol=2e-5)


@pytest.fixture(scope="module")
def experts() -> NVFP4Experts:
    layer = NVFP4Experts(4, 32, 16, calibrated=True)
    for name, shape in (("gate_up", (4, 32, 32)), ("down", (4, 32, 16))):
        x = jnp.asarray(np.random.default_rng(len(name)).standard_normal(shape), jnp.float32)
        held = quantize(x, "mse")
        getattr(layer, name + "_codes").set_value(held.codes)
        getattr(layer, name + "_scales").set_value(held.scales)
        wide = jnp.broadcast_to(held.global_scale[:, None], shape[:2])
        getattr(layer, name + "_global").set_value(wide)
    layer.gate_up_input.set_value(jnp.full(8, 0.001, jnp.float32).at[3].set(0.002))
    layer.down_input.set_value(jnp.full(4, 0.01, jnp.float32))
    return layer


@pytest.mark.parametrize("activations", ["w4a16", "w4a4"])
def test_weights_arranged_for_a_gpu_kernel_give_the_same(activations):
    """In a model: what has no tiles stays as it is."""

    class Model(nnx.Module):
        def __init__(self):
            self.whole, _ = filled((64, 128))
            self.narrow, _ = filled((48, 128))
            self.experts = NVFP4Experts(2, 64, 64, calibrated=True)
            rng = np.random.default_rng(0)
            for name in ("gate_up_codes", "down_codes"):
                codes = getattr(self.experts, name)
                codes.set_value(jnp.asarray(rng.integers(0, 256, codes.shape, dtype=np.uint8)))
            for name in ("gate_up_scales", "down_scales"):
                getattr(self.experts, name).set_value(jnp.ones_like(getattr(self.experts, name)[...]))

    def results(model: Model) -> list:
        x = jnp.asarray(np.random.default_rng(1).standard_normal((3, 128)), jnp.float32)
        ids, weights = jnp.asarray([[0, 1], [1, -1], [-1, 0]]), jnp.full((3, 2), 0.25)
        return [
            model.whole.matmul(x),
            model.narrow.matmul(x),
            model.experts.apply(x[:, :64], ids.astype(jnp.int32), weights),
        ]

    model = Model()
    set_activations(model, activations)
    codes, before = model.whole.codes[...], results(model)
    assert arrange(model) == 0  # on a CPU
    with assume("sm_90"):
        assert arrange(model) == 3
        assert arrange(model) == 0
    assert model.whole.codes.dtype == model.experts.down_codes.dtype == jnp.uint32
    assert model.narrow.codes.dtype == jnp.uint8
    np.testing.assert_array_equal(from_words(model.whole.codes[...]), codes)
    for got, want in zip(results(model), before, strict=True):
        assert np.abs(want).max() > 0.1
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("activations", ["w4a16", "w4a4"])
def test_experts_against_a_loop_in_float64(experts, activations):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((6, 32)).astype(np.float32)
    ids = np.array([[0, 1], [1, -1], [3, 2], [2, 0], [-1, -1], [1, 3]], np.int32)
    weights = rng.uniform(0.1, 1, ids.shape).astype(np.float32)
    set_activations(experts, activations)

    def value(name):
        held = [getattr(experts, f"{name}_{field}")[...] for field in ("codes", "scales", "global")]
        from hybridjax.quantization import decode

        return np.asarray(decode(*held[:2]), np.float64) * np.asarray(held[2], np.float64)[..., None]

    gate_up, down = value("gate_up"), value("down")
    want = np.zeros((6, 32))
    four_bits = activations == "w4a4"
    inputs = rounded(x, float(np.float32(0.002))) if four_bits else x.astype(np.float64)
    for n in range(6):
        for j in range(2):
            if ids[n, j] < 0:
                continue
            gate, up = np.split(gate_up[ids[n, j]] @ inputs[n], 2)
            hidden = (gate / (1 + np.exp(-gate)) * up).astype(np.float32)
            if four_bits:
                hidden = rounded(hidden[None], float(np.float32(0.01)))[0]
            want[n] += weights[n, j] * (down[ids[n, j]] @ hidden)
    got = jax.jit(lambda *args: experts.apply(*args))(jnp.asarray(x), jnp.asarray(ids), jnp.asarray(weights))
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-4 * np.abs(want).max())


@pytest.mark.parametrize(
    ("activations", "rows", "calibrated", "architecture", "expected"),
    [
        ("auto", 4096, True, "cpu", "w4a16"),
        ("auto", 4096, True, "sm_90", "w4a16"),
        ("auto", 48, True, "sm_100", "w4a16"),
        ("auto", 49, True, "sm_100", "w4a4"),
        ("auto", 49, False, "sm_100", "w4a16"),
        ("by_rows", 49, True, "sm_90", "w4a4"),
        ("by_rows", 48, True, "sm_90", "w4a16"),
        ("by_rows", 49, False, "sm_90", "w4a16"),
        ("w4a16", 4096, True, "sm_100", "w4a16"),
        ("w4a4", 1, True, "cpu", "w4a4"),
    ],
)
def test_what_decides_between_w4a16_and_w4a4(activations, rows, calibrated, architecture, expected):
    assert activation_format(activations, rows, (512, 512), calibrated, architecture) == expected


def test_the_crossover_is_that_of_the_shape():
    assert crossover("sm_120", (12288, 4096)) == 16
    assert crossover("sm_120", (100, 4096)) == 48
    assert crossover("sm_90", (12288, 4096)) == 48


def test_a_weight_asks_for_its_rows_and_the_machine():
    weight, _ = filled((24, 64))
    weight.input_scale.set_value(jnp.asarray([0.002], jnp.float32))
    rng = np.random.default_rng(1)
    few, many = (jnp.asarray(rng.standard_normal((2, rows, 64)), jnp.float32) for rows in (24, 25))
    weight.activations = "by_rows"
    chosen = weight.matmul(few), weight.matmul(many)
    weight.activations = "w4a16"
    np.testing.assert_array_equal(weight.matmul(few), chosen[0])
    weight.activations = "w4a4"
    np.testing.assert_array_equal(weight.matmul(many), chosen[1])
    weight.activations = "auto"
    with assume("cpu"):
        np.testing.assert_array_equal(weight.matmul(few), chosen[0])


@pytest.mark.parametrize("activations", ["w4a4", "w4a8"])
def test_what_cannot_be_is_refused(activations):
    weight, _ = filled((24, 64), calibrated=False)
    if activations == "w4a4":
        with pytest.raises(ConfigError, match="parts.0 has no input scale; calibrate"):
            set_activations(SplitWeight([weight]), activations)
    with pytest.raises(ValueError, match="input scales" if activations == "w4a4" else "is 'w4a8'; allowed"):
        activation_format(activations, 1, (24, 64), False, "cpu")
