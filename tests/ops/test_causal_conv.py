"""The depthwise causal convolution against a float64 sum, whole and in steps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hybridjax.batch import TILE, Batch, Mode
from hybridjax.ops.causal_conv import causal_conv

CHANNELS = 6


def oracle(x, weight, dilation):
    """[L, C] -> float64[L, C]: tap K - 1 weighs the row itself."""
    taps = weight.shape[-1]
    out = np.zeros(x.shape)
    for t in range(len(x)):
        for j in range(taps):
            s = t - (taps - 1 - j) * dilation
            if s >= 0:
                out[t] += np.asarray(weight[:, 0, j], np.float64) * np.asarray(x[s], np.float64)
    return out


def draw(length, taps, dtype=jnp.float32):
    rng = np.random.default_rng(length * 7 + taps)
    x = jnp.asarray(rng.standard_normal((length, CHANNELS)), dtype)
    return x, jnp.asarray(rng.standard_normal((CHANNELS, 1, taps)), dtype)


def step_batch(mode, positions, slot):
    tiles = len(positions) // TILE if mode is Mode.PREFILL else 0
    return Batch(
        tokens=jnp.zeros(len(positions), jnp.int32),
        positions=jnp.asarray(positions, jnp.int32),
        tile_sequence=jnp.zeros(tiles, jnp.int32),
        context_length=jnp.zeros(len(slot), jnp.int32),
        slot=jnp.asarray(slot, jnp.int32),
        page_table=jnp.zeros((len(slot), 0), jnp.int32),
        logit_rows=jnp.zeros(0, jnp.int32),
        mode=mode,
    )


@pytest.mark.parametrize(("taps", "dilation"), [(1, 1), (2, 1), (4, 1), (4, 3)])
def test_whole_sequences_equal_the_sum_over_taps(taps, dilation):
    length = 70
    x, weight = draw(2 * length, taps)
    batch = Batch.whole(jnp.zeros((2, length), jnp.int32))
    rows = np.flatnonzero(batch.positions >= 0)
    padded = jnp.full((batch.tokens.shape[0], CHANNELS), jnp.nan).at[rows].set(x)
    out, pool = causal_conv(padded, weight, batch, None, dilation=dilation)
    assert pool is None and out.dtype == jnp.float32
    for b in range(2):
        want = oracle(x[b * length : (b + 1) * length], weight, dilation)
        np.testing.assert_allclose(out[rows[b * length : (b + 1) * length]], want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("taps", "dilation"), [(1, 1), (4, 1), (4, 3)])
@pytest.mark.parametrize("prompt", [1, 64, 100])
def test_steps_equal_the_whole_bit_for_bit(taps, dilation, prompt):
    """bfloat16 rows: a prefill cut at 64, then six decoded tokens; products are summed in float32."""
    length = prompt + 6
    x, weight = draw(length, taps, jnp.bfloat16)
    pool = jnp.full((4, (taps - 1) * dilation, CHANNELS), jnp.nan, jnp.bfloat16)
    outs = []
    for start in range(0, prompt, TILE):
        end = min(prompt, start + TILE)
        positions = np.full(TILE, -1)
        positions[: end - start] = np.arange(start, end)
        rows = jnp.full((TILE, CHANNELS), jnp.nan, jnp.bfloat16).at[: end - start].set(x[start:end])
        out, pool = causal_conv(
            rows, weight, step_batch(Mode.PREFILL, positions, [2]), pool, dilation=dilation
        )
        outs.append(out[: end - start])
    for t in range(prompt, length):
        rows = jnp.stack([jnp.full(CHANNELS, jnp.nan, jnp.bfloat16), x[t]])
        batch = step_batch(Mode.DECODE, [-1, t], [0, 2])
        out, pool = causal_conv(rows, weight, batch, pool, dilation=dilation)
        outs.append(out[1:])
    got = np.concatenate(outs)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, oracle(x, weight, dilation), rtol=1e-5, atol=1e-5)
    batch = Batch.whole(jnp.zeros((1, length), jnp.int32))
    padded = jnp.zeros((batch.tokens.shape[0], CHANNELS), jnp.bfloat16).at[:length].set(x)
    whole, _ = causal_conv(padded, weight, batch, None, dilation=dilation)
    np.testing.assert_array_equal(got, whole[:length])
    assert np.isnan(np.asarray(pool[np.array([1, 3])], np.float32)).all()


def test_gradients_equal_those_of_the_sum():
    x, weight = draw(64, 4)
    batch = Batch.whole(jnp.zeros((1, 64), jnp.int32))
    cotangent = np.random.default_rng(0).standard_normal((64, CHANNELS)).astype(np.float32)
    dx, dw = jax.grad(lambda x, w: jnp.sum(causal_conv(x, w, batch, None)[0] * cotangent), (0, 1))(x, weight)
    padded = np.concatenate([np.asarray(x), np.zeros((3, CHANNELS))])
    wide = np.concatenate([cotangent, np.zeros((3, CHANNELS))])
    want_dx = sum(wide[3 - j : 67 - j] * np.asarray(weight)[:, 0, j] for j in range(4))
    np.testing.assert_allclose(dx, want_dx, rtol=1e-5, atol=1e-5)
    want_dw = [np.sum(padded[: 61 + j] * cotangent[3 - j :][: 61 + j], axis=0) for j in range(4)]
    np.testing.assert_allclose(dw[:, 0], np.stack(want_dw, axis=1), rtol=1e-4, atol=1e-4)
