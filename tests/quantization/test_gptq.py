"""GPTQ against a float64 version that goes column by column, against all codes there are, and its limits."""

import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from hybridjax.quantization import block_scales, encode, global_scale, gptq

VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def nearest_value(x: np.ndarray) -> np.ndarray:
    return np.clip(x, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float64)


def slow_gptq(weight, hessian, steps, damp, ordering):
    """The values of the codes, by the definition: the inverse is recomputed after every column."""
    weight, hessian, steps = (np.asarray(a, np.float64) for a in (weight, hessian, steps))
    columns = weight.shape[1]
    dead = np.diag(hessian) == 0
    mean = np.diag(hessian)[~dead].mean()
    order = np.argsort(-np.diag(hessian), kind="stable") if ordering == "static" else np.arange(columns)
    hessian = hessian + np.diag(np.where(dead, mean, 0.0) + damp * mean)
    left = np.where(dead, 0.0, weight)
    out = np.zeros_like(weight)
    for place, column in enumerate(order):
        rest = order[place:]
        inverse = np.linalg.inv(hessian[np.ix_(rest, rest)])
        step = steps[:, column // 16]
        out[:, column] = nearest_value(
            np.divide(left[:, column], step, where=step > 0, out=np.zeros(len(left)))
        )
        error = left[:, column] - out[:, column] * step
        left[:, rest] -= np.outer(error, inverse[0]) / inverse[0, 0]
    return out


def problem(rows, columns, samples, seed=0):
    """Weights, correlated inputs and the plain rule's scales."""
    rng = np.random.default_rng(seed)
    mix = rng.standard_normal((columns, columns)) * rng.uniform(0.1, 2, columns)[:, None] / columns**0.5
    x = rng.standard_normal((samples, columns)) @ mix + 0.3 * rng.standard_normal(columns)
    weight = rng.standard_normal((rows, columns)) * rng.uniform(0.5, 2, (rows, 1))
    weight, x = jnp.asarray(weight, jnp.float32), jnp.asarray(x, jnp.float32)
    hessian = jnp.einsum("ni,nj->ij", x, x, precision="highest")
    amax = jnp.max(jnp.abs(weight))
    return weight, hessian, block_scales(weight, amax), global_scale(amax)


def values(codes):
    return np.asarray(codes).astype(np.float64)


def output_error(weight, hessian, steps, codes):
    steps = np.repeat(np.asarray(steps, np.float64), 16, axis=1)
    difference = values(codes) * steps - np.asarray(weight, np.float64)
    return np.einsum("ni,ij,nj->n", difference, np.asarray(hessian, np.float64), difference)


@pytest.mark.parametrize("ordering", ["static", "none"])
@pytest.mark.parametrize("columns", [48, 64, 112])
def test_it_is_the_definition(ordering, columns):
    weight, hessian, scales, scale = problem(24, columns, 300, seed=columns)
    codes, fine = gptq(weight, hessian, scales, scale, ordering=ordering, block=32)
    steps = scales.astype(jnp.float32) * scale
    wanted = slow_gptq(weight, hessian, steps, 0.01, ordering)
    assert fine
    # float32 decides a tie otherwise now and then, and the rest of that row follows it.
    rows = np.all(values(codes) == wanted, axis=1)
    assert rows.sum() >= 22
    assert np.sum(output_error(weight, hessian, steps, codes)) == pytest.approx(
        np.sum(output_error(weight, hessian, steps, wanted)), rel=0.02
    )


def test_the_size_of_a_block_decides_nothing():
    weight, hessian, scales, scale = problem(16, 96, 300)
    results = [values(gptq(weight, hessian, scales, scale, block=b)[0]) for b in (16, 40, 96, 128)]
    for other in results[1:]:
        assert np.mean(np.all(results[0] == other, axis=1)) >= 0.9


@pytest.mark.parametrize("seed", range(4))
def test_the_output_error_is_well_below_that_of_rounding(seed):
    weight, hessian, scales, scale = problem(32, 128, 1000, seed)
    steps = scales.astype(jnp.float32) * scale
    rounded = output_error(weight, hessian, steps, encode(weight, scales, scale))
    found = output_error(weight, hessian, steps, gptq(weight, hessian, scales, scale)[0])
    assert found.sum() < 0.6 * rounded.sum()
    assert np.mean(found <= rounded) > 0.95


def test_it_comes_near_the_best_of_all_codes():
    # Five live columns: every combination of codes can be tried.
    weight, hessian, scales, scale = problem(12, 16, 100, seed=5)
    live = np.arange(16) < 5
    hessian = jnp.where(live[:, None] & live[None, :], hessian, 0.0)
    steps = np.asarray(scales.astype(jnp.float32) * scale, np.float64)[:, 0]
    grid = np.array(list(itertools.product(np.concatenate([-VALUES[:0:-1], VALUES]), repeat=5)))
    h = np.asarray(hessian, np.float64)[:5, :5]
    codes = values(gptq(weight, hessian, scales, scale, damp=1e-4)[0])
    plain = values(encode(weight, scales, scale))
    for row, step in enumerate(steps):
        target = np.asarray(weight[row, :5], np.float64)

        def cost(candidates, step=step, target=target):
            difference = candidates * step - target
            return np.einsum("...i,ij,...j->...", difference, h, difference)

        best = cost(grid).min()
        assert best <= cost(codes[row, :5]) * (1 + 1e-9)
        assert cost(codes[row, :5]) <= max(cost(plain[row, :5]), 4 * best) * (1 + 1e-9)


def test_columns_that_no_input_reaches_become_zero_and_disturb_nothing():
    weight, hessian, scales, scale = problem(8, 64, 300)
    dead = np.isin(np.arange(64), [0, 17, 40, 63])
    hessian = jnp.where(dead[:, None] | dead[None, :], 0.0, hessian)
    codes, fine = gptq(weight, hessian, scales, scale)
    wanted = slow_gptq(weight, hessian, scales.astype(jnp.float32) * scale, 0.01, "static")
    assert fine and not values(codes)[:, dead].any()
    assert np.mean(np.all(values(codes) == wanted, axis=1)) >= 0.75


def test_blocks_of_zeros_stay_zero():
    weight, hessian, scales, scale = problem(8, 64, 300)
    weight = weight.at[:, 16:32].set(0.0)
    scales = block_scales(weight, jnp.max(jnp.abs(weight)))
    codes, fine = gptq(weight, hessian, scales, scale)
    assert fine and not values(codes)[:, 16:32].any() and values(codes).any()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -1e6])
def test_a_hessian_without_a_factor_leaves_plain_rounding(bad):
    weight, hessian, scales, scale = problem(8, 32, 100)
    codes, fine = gptq(weight, hessian.at[3, 3].set(bad), scales, scale)
    assert not fine
    np.testing.assert_array_equal(values(codes), values(encode(weight, scales, scale)))


def test_no_data_at_all_is_not_a_failure():
    weight, hessian, scales, scale = problem(8, 32, 100)
    codes, fine = gptq(weight, jnp.zeros_like(hessian), scales, scale)
    assert fine and not values(codes).any()


def test_the_factor_of_the_hessian_does_not_matter():
    weight, hessian, scales, scale = problem(8, 64, 200)
    codes, _ = gptq(weight, hessian, scales, scale)
    again, _ = gptq(weight, hessian * 2.0**-20, scales, scale)
    np.testing.assert_array_equal(values(codes), values(again))


def test_a_stack_and_scales_of_each_row():
    weight, hessian, scales, scale = problem(8, 32, 100)
    one, _ = gptq(weight, hessian, scales, scale)
    run = jax.vmap(lambda w, h: gptq(w, h, scales, jnp.full((8, 1), scale)))
    both, fine = run(jnp.stack([weight, -weight]), jnp.stack([hessian, hessian]))
    assert fine.tolist() == [True, True]
    np.testing.assert_array_equal(values(both[0]), values(one))
    np.testing.assert_array_equal(values(both[1]), -values(one))


def test_what_does_not_fit_is_named():
    weight, hessian, scales, scale = problem(8, 32, 100)
    with pytest.raises(ValueError, match=r"ordering is 'dynamic'; allowed: static, none"):
        gptq(weight, hessian, scales, scale, ordering="dynamic")
    with pytest.raises(ValueError, match=r"hessian \[16, 16\]"):
        gptq(weight, hessian[:16, :16], scales, scale)
    with pytest.raises(ValueError, match=r"weight \[8, 24\]"):
        gptq(weight[:, :24], hessian[:24, :24], scales, scale)
