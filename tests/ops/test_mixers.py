"""Around the recurrences: forms for XLA against the definitions, and which kernels may be asked for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hybridjax.batch import Batch, Mode
from hybridjax.ops import mixers
from hybridjax.ops.dispatch import assume

SIZE, EPS, THETA = 128, 1e-6, 1e4


def normal(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


@pytest.mark.parametrize("parts", ["all", "no norms", "no rotation"])
def test_queries_and_keys_in_one_array_give_what_the_definition_gives(parts):
    heads, size, rows = 3, 16, 4
    norms = (None, None) if parts == "no norms" else (normal(1, size), normal(2, size))
    operands = (
        normal(0, rows, 4 * heads * size),
        *norms,
        normal(3, heads * size),
        jnp.asarray([0.5, 0.1, 0.01]),
        normal(4, 6, heads, size, size),
        jnp.asarray([2, 0, 5, 1], jnp.int32),
        jnp.asarray([3, -1, 0, 900], jnp.int32),
    )
    options = {"scale": 0.3, "eps": EPS, "theta": None if parts == "no rotation" else THETA, "gate": True}
    want, pool = mixers.lightning_decode.reference(*operands, **options)
    got, after = mixers._lightning_decode_together(*operands, **options)
    live = np.array([0, 2, 3])
    np.testing.assert_allclose(got[live], want[live], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(after[1:], pool[1:], rtol=1e-5, atol=1e-5)


def test_gates_are_the_same_as_halves_of_one_array():
    projected, rate, bias = normal(0, 5, 30), normal(1, 6), normal(2, 6)
    for want, got in zip(*(mixers.gates(projected, rate, bias, together=x) for x in (False, True))):
        np.testing.assert_allclose(got, want, rtol=1e-6)
    step = np.asarray(projected[:, -6:], np.float64) + np.asarray(bias)
    g, _ = mixers.gates(projected, rate, bias, together=True)
    np.testing.assert_allclose(g, -np.exp(rate) * np.logaddexp(0, step), rtol=1e-5)


def rows_kernel(rows, dtype=jnp.bfloat16, size=SIZE, theta=THETA, architecture="sm_90", name=None):
    weight = jnp.zeros((size,), dtype)
    with assume(architecture):
        return mixers.lightning_rows.select(
            jnp.zeros((rows, 16 * size), dtype),
            weight,
            weight,
            jnp.zeros((rows,), jnp.int32),
            heads=4,
            size=size,
            eps=EPS,
            theta=theta,
            implementation=name,
        )


def inputs_kernel(
    mode=Mode.PREFILL,
    rows=128,
    dtype=jnp.bfloat16,
    heads=4,
    size=SIZE,
    taps=4,
    architecture="sm_90",
    name=None,
):
    nothing = jnp.zeros((0,), jnp.int32)
    batch = Batch(
        tokens=jnp.zeros((rows,), jnp.int32),
        positions=jnp.zeros((rows,), jnp.int32),
        tile_sequence=jnp.zeros((rows // 64,), jnp.int32),
        context_length=nothing,
        slot=jnp.zeros((1,), jnp.int32),
        page_table=nothing[None],
        logit_rows=nothing,
        mode=mode,
    )
    channels, per_head = (4 + heads) * size, jnp.zeros((heads,), jnp.float32)
    with assume(architecture):
        return mixers.gated_delta_inputs.select(
            jnp.zeros((rows, channels + heads * size + 16), dtype),
            jnp.zeros((channels, 1, taps), dtype),
            per_head,
            per_head,
            batch,
            jnp.zeros((2, taps - 1, channels), dtype),
            key_heads=2,
            key_size=size,
            value_size=size,
            implementation=name,
        )


def test_a_kernel_is_chosen_where_it_ran():
    for kernel in (rows_kernel, inputs_kernel):
        assert kernel(rows=128) == "mosaic_gpu"
        assert {kernel(rows=128, architecture=other) for other in ("cpu", "sm_100")} == {"reference"}


@pytest.mark.parametrize("mode", [Mode.WHOLE, Mode.DECODE])
def test_training_and_decoding_keep_the_definition_of_the_inputs(mode):
    assert inputs_kernel(mode) == "reference"


@pytest.mark.parametrize(
    "unfit",
    [
        {"rows": 96},
        {"dtype": jnp.float32},
        {"size": 64},
        {"theta": None},
        {"architecture": "sm_80"},
    ],
)
def test_what_a_kernel_does_not_hold_is_refused_by_name(unfit):
    with pytest.raises(NotImplementedError, match=r"lightning_rows.*mosaic_gpu.*\["):
        rows_kernel(**{"rows": 128, "name": "mosaic_gpu", **unfit})


@pytest.mark.parametrize(
    "unfit",
    [
        {"rows": 96},
        {"dtype": jnp.float32},
        {"size": 64},
        {"heads": 3},
        {"taps": 3},
        {"mode": Mode.DECODE},
        {"architecture": "sm_100"},
    ],
)
def test_inputs_that_the_kernel_does_not_hold_are_refused_by_name(unfit):
    with pytest.raises(NotImplementedError, match=r"gated_delta_inputs.*mosaic_gpu.*\["):
        inputs_kernel(**{"name": "mosaic_gpu", **unfit})


@pytest.mark.parametrize(("heads", "chosen"), [(4, "mosaic_gpu"), (5, "reference")])
def test_threads_of_the_output_kernel_own_pairs_of_channels(heads, chosen):
    out = jax.ShapeDtypeStruct((64, heads, 128), jnp.float32)
    projected = jax.ShapeDtypeStruct((64, 4 * heads * 128), jnp.bfloat16)
    norm = jax.ShapeDtypeStruct((heads * 128,), jnp.bfloat16)
    with assume("sm_90"):
        assert mixers.lightning_output.select(out, projected, norm, eps=EPS, gate=True) == chosen


@pytest.mark.parametrize(("first", "chosen"), [(32, "mosaic_gpu"), (16, "reference")])
def test_gates_begin_where_the_copy_engine_can(first, chosen):
    out = jax.ShapeDtypeStruct((64, 1, 128), jnp.float32)
    projected = jax.ShapeDtypeStruct((64, 160), jnp.bfloat16)
    norm = jax.ShapeDtypeStruct((128,), jnp.bfloat16)
    options = {"first": first, "eps": EPS, "activation": "silu"}
    with assume("sm_90"):
        assert mixers.gated_delta_output.select(out, projected, norm, **options) == chosen
