"""The NVFP4 kernels against float64: interpreted on a CPU, compiled on a GPU.

Interpreted kernels multiply in plain jnp; what the lanes do instead is in test_nvfp4_fragment.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreting import ON_GPU, interpreted

from hybridjax.errors import ConfigError
from hybridjax.ops import nvfp4_experts, nvfp4_w4a16
from hybridjax.ops.dispatch import assume
from hybridjax.pallas_kernels.nvfp4 import experts, w4a16
from hybridjax.pallas_kernels.nvfp4.kernel import Tuning, default_tuning
from hybridjax.quantization import NVFP4, decode, from_words, quantize, to_words


def normal(seed, *shape, dtype=jnp.bfloat16):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def stored(seed, *shape):
    """Matrices whose rows have global scales of their own, and their float64 values."""
    plain = quantize(normal(seed, *shape, dtype=jnp.float32) * shape[-1] ** -0.5)
    factor = jnp.asarray(np.random.default_rng(seed).uniform(0.5, 2, shape[:-1]), jnp.float32)
    scale = plain.global_scale[..., None] * factor
    values = np.asarray(decode(plain.codes, plain.scales), np.float64)
    exact = values * np.asarray(scale, np.float64)[..., None]
    return NVFP4(to_words(plain.codes), plain.scales, scale), exact


def close(got, want, tolerance):
    got = np.asarray(got, np.float64)
    assert np.linalg.norm(got - want, axis=-1).max() <= tolerance * np.linalg.norm(want, axis=-1).max()


@pytest.mark.usefixtures("no_races")
@pytest.mark.parametrize(
    ("rows", "columns", "features", "tuning"),
    [
        (1, 1024, 128, Tuning(64, 1, 3)),
        (5, 1024, 64, Tuning(64, 2, 2)),
        (16, 512, 128, Tuning(128, 1, 2)),
        (9, 192, 128, None),  # whole rows
        (33, 512, 64, None),
        (70, 256, 64, None),  # two blocks of 40
    ],
)
def test_a_product_is_that_of_the_definition(rows, columns, features, tuning):
    weight, exact = stored(1, features, columns)
    x = normal(2, rows, columns)
    run = interpreted(w4a16)
    got = run(x, weight.codes, weight.scales, weight.global_scale, jnp.float32, tuning=tuning)
    want = np.asarray(x, np.float64) @ exact.T
    close(got, want, 1e-5 if ON_GPU else 1e-6)  # tensor cores cut off sums where they add
    rounded = run(x, weight.codes, weight.scales, weight.global_scale, tuning=tuning)
    assert rounded.dtype == jnp.bfloat16
    np.testing.assert_array_equal(rounded, got.astype(jnp.bfloat16))


def test_a_row_does_not_depend_on_others_or_on_what_is_not_there():
    weight, _ = stored(1, 64, 512)
    x = normal(2, 7, 512)
    arrays = (weight.codes, weight.scales, weight.global_scale)
    run = interpreted(w4a16)
    tuning = Tuning(64, 1, 2)
    want = run(x, *arrays, tuning=tuning)
    poisoned = run(x.at[3].set(jnp.nan), *arrays, tuning=tuning)
    assert np.isnan(np.asarray(poisoned[3], np.float32)).all()
    others = np.array([0, 1, 2, 4, 5, 6])
    np.testing.assert_array_equal(poisoned[others], want[others])


def test_sizes_that_have_no_tiles_are_refused():
    weight, _ = stored(1, 48, 512)
    with pytest.raises(ValueError, match="3 rows.*48 features"):
        w4a16(normal(2, 3, 512), weight.codes, weight.scales, weight.global_scale)
    for features, columns, tuning in (
        (128, 320, Tuning(128, 1, 1)),
        (128, 320, Tuning(64, 1, 2)),
        (192, 512, Tuning(128, 1, 2)),
        (128, 768, Tuning(128, 2, 2)),
    ):
        whole, _ = stored(1, features, columns)
        with pytest.raises(ValueError, match=f"Tuning.* does not divide {features} features of {columns}"):
            w4a16(normal(2, 3, columns), whole.codes, whole.scales, whole.global_scale, tuning=tuning)
    weight, _ = stored(1, 64, 512)
    with pytest.raises(ValueError, match="codes are uint8.*to_words"):
        w4a16(normal(2, 3, 512), from_words(weight.codes), weight.scales, weight.global_scale)
    args, _ = experts_case(5, 3, 4, 2, 64, 96)
    with pytest.raises(ValueError, match="96 values"):
        experts(*args)


def experts_case(seed, rows, count, k, hidden, width):
    rng = np.random.default_rng(seed)
    (gate_up, wide), (down, narrow) = (
        stored(seed, count, 2 * width, hidden),
        stored(seed + 1, count, hidden, width),
    )
    x = normal(seed + 2, rows, hidden)
    ids = np.array([rng.permutation(count)[:k] for _ in range(rows)], np.int32)
    ids[rng.random((rows, k)) < 0.15] = -1
    weights = rng.random((rows, k)).astype(np.float32)
    want = np.zeros((rows, hidden))
    for n, row in enumerate(np.asarray(x, np.float64)):
        for weight, e in zip(weights[n], ids[n]):
            if e >= 0:
                gate, up = np.split(wide[e] @ row, 2)
                middle = jnp.asarray(gate / (1 + np.exp(-gate)) * up, jnp.bfloat16)
                want[n] += weight * (narrow[e] @ np.asarray(middle, np.float64))
    return (x, jnp.asarray(ids), jnp.asarray(weights), gate_up, down), want


@pytest.mark.usefixtures("no_races")
@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize(("rows", "hidden", "width"), [(3, 256, 64), (12, 64, 128), (2, 256, 512)])
def test_experts_are_those_of_the_definition(alone, rows, hidden, width):
    args, want = experts_case(5, rows, 4, 2, hidden, width)
    got = interpreted(experts)(*args, alone=alone)
    close(got, want, 2**-8)
    padding = np.all(np.asarray(args[1]) < 0, axis=1)
    assert not np.asarray(got, np.float32)[padding].any()


def test_an_expert_that_many_choose_has_several_blocks():
    args, _ = experts_case(7, 20, 2, 1, 64, 64)
    args = (args[0], jnp.ones_like(args[1]), *args[2:])
    got = interpreted(experts)(*args, alone=False)
    close(got, np.asarray(nvfp4_experts(*args, implementation="reference"), np.float64), 2**-7)


def shapes(rows, columns, features, dtype=jnp.bfloat16):
    return [
        jax.ShapeDtypeStruct(shape, kind)
        for shape, kind in (
            ((rows, columns), dtype),
            ((features, columns // 8), jnp.uint32),
            ((features, columns // 16), jnp.float8_e4m3fn),
            ((features,), jnp.float32),
        )
    ]


@pytest.mark.parametrize(
    ("where", "args", "fits"),
    [
        ("sm_90", shapes(1, 4096, 32768), True),
        ("sm_90", shapes(64, 640, 2560), True),
        ("sm_90", shapes(128, 4096, 4096), True),
        ("sm_90", shapes(129, 4096, 4096), False),
        ("sm_90", shapes(1, 4096, 32768, jnp.float32), False),
        ("sm_90", shapes(1, 1120, 64), False),
        ("sm_90", shapes(1, 4096, 4100), False),
        ("sm_100", shapes(1, 4096, 32768), False),
        ("cpu", shapes(1, 4096, 32768), False),
    ],
)
def test_what_the_kernel_takes_follows_rows_dtype_sizes_and_hardware(where, args, fits):
    stored = [args[0], jax.ShapeDtypeStruct((args[1].shape[0], args[1].shape[1] * 4), jnp.uint8), *args[2:]]
    otherwise = "reference" if where == "cpu" else "xla"
    with assume(where):
        assert nvfp4_w4a16.select(*args) == ("mosaic_gpu" if fits else otherwise)
        assert nvfp4_w4a16.select(*stored) == otherwise  # in the order of a checkpoint
        for refused in [stored] if fits else [args, stored]:
            with pytest.raises((ConfigError, NotImplementedError)):
                nvfp4_w4a16.select(*refused, implementation="mosaic_gpu")


@pytest.mark.parametrize(
    ("shape", "want"),
    [
        ((1, 4096, 32768, 1), Tuning(128, 1, 3)),  # the first four are in the table
        ((8, 16384, 4096, 1), Tuning(128, 16, 2)),
        ((1, 4096, 4096, 1), Tuning(64, 8, 4)),
        ((1, 2560, 1280, 10), Tuning(64, 5, 2)),
        ((64, 4096, 4096, 1), Tuning(128, 8, 2)),
        ((16, 4096, 12288, 1), Tuning(128, 4, 2)),
        ((1, 640, 2560, 10), Tuning(64, 1, 1)),
    ],
)
def test_every_multiprocessor_gets_programs_and_every_program_columns(shape, want):
    with assume("sm_90"):
        assert default_tuning(*shape, processors=132) == want
