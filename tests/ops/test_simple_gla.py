"""SimpleGLA against a float64 recurrence: whole, ragged prefill, decode, and their agreement."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridjax.batch import TILE
from hybridjax.ops import simple_gla_decode, simple_gla_prefill, simple_gla_whole
from hybridjax.ops.simple_gla import decay_slopes

HEADS, KEY, VALUE, SCALE = 4, 8, 6, 0.3


def oracle(q, k, v, slopes, initial=None):
    """The recurrence of one sequence in float64: [L, H, D] -> outputs and final state."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    state = np.zeros((q.shape[1], q.shape[2], v.shape[2])) if initial is None else np.array(initial, float)
    decay = np.exp(-np.asarray(slopes, np.float64))[:, None, None]
    out = []
    for t in range(len(q)):
        state = decay * state + k[t][:, :, None] * v[t][:, None, :]
        out.append(SCALE * np.einsum("hk,hkv->hv", q[t], state))
    return np.array(out), state


def inputs(seed, *shape):
    rng = np.random.default_rng(seed)
    draw = [rng.standard_normal((*shape, HEADS, d)).astype(np.float32) for d in (KEY, KEY, VALUE)]
    return [jnp.asarray(x) for x in draw]


def test_slopes_are_those_of_the_released_model():
    slopes = decay_slopes(32)
    np.testing.assert_allclose(slopes, 2.0 ** (-(np.arange(32) + 1) / 4), rtol=1e-6)
    assert np.exp(-slopes[0]) == pytest.approx(0.431324, abs=1e-6)
    assert np.exp(-slopes[31]) == pytest.approx(0.996101, abs=1e-6)


def test_slopes_for_six_heads_continue_with_every_second_slope_of_eight():
    np.testing.assert_allclose(decay_slopes(6), [0.25, 0.0625, 0.015625, 2**-8, 0.5, 0.125], rtol=1e-6)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("length", [1, 63, 64, 65, 100, 200])
def test_whole_sequences_equal_the_float64_recurrence(implementation, length):
    q, k, v = inputs(length, 2, length)
    slopes = jnp.asarray(decay_slopes(HEADS))
    out, final = simple_gla_whole(q, k, v, slopes, scale=SCALE, implementation=implementation)
    for b in range(2):
        want, state = oracle(q[b], k[b], v[b], slopes)
        np.testing.assert_allclose(out[b], want, rtol=2e-5, atol=2e-5)
        np.testing.assert_allclose(final[b], state, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_extreme_decays_neither_overflow_nor_leak(implementation):
    q, k, v = inputs(0, 1, 150)
    slopes = jnp.asarray([0.0, 1e-6, 5.0, 80.0], jnp.float32)
    out, final = simple_gla_whole(q, k, v, slopes, scale=SCALE, implementation=implementation)
    want, state = oracle(q[0], k[0], v[0], slopes)
    np.testing.assert_allclose(out[0], want, rtol=5e-5, atol=5e-5)
    np.testing.assert_allclose(final[0], state, rtol=5e-5, atol=5e-5)


def test_bfloat16_inputs_are_computed_in_float32():
    q, k, v = (x.astype(jnp.bfloat16) for x in inputs(3, 1, 130))
    slopes = jnp.asarray(decay_slopes(HEADS))
    out, final = simple_gla_whole(q, k, v, slopes, scale=SCALE)
    assert out.dtype == final.dtype == jnp.float32
    np.testing.assert_allclose(out[0], oracle(q[0], k[0], v[0], slopes)[0], rtol=2e-5, atol=2e-5)


def test_gradients_of_the_chunked_form_equal_those_of_the_definition():
    arrays = inputs(7, 2, 100)
    slopes = jnp.asarray(decay_slopes(HEADS))

    def loss(implementation):
        def value(arrays):
            out, final = simple_gla_whole(*arrays, slopes, scale=SCALE, implementation=implementation)
            return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(final))

        return jax.grad(value)(arrays)

    for got, want in zip(loss("xla"), loss("reference"), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def ragged(chunks, tiles):
    """Rows of (slot, start, end) chunks laid out in tiles: slot, tile_sequence, positions, row of each."""
    positions = np.full(tiles * TILE, -1, np.int32)
    tile_sequence = np.full(tiles, len(chunks), np.int32)
    rows, tile = [], 0
    for i, (_, start, end) in enumerate(chunks):
        first = tile
        for grid in range(start // TILE, -(-end // TILE)):
            low, high = max(start, grid * TILE), min(end, (grid + 1) * TILE)
            base = tile * TILE - grid * TILE
            positions[base + low : base + high] = np.arange(low, high)
            tile_sequence[tile] = i
            tile += 1
        rows.append(first * TILE + start % TILE + np.arange(end - start))
    slot = np.array([s for s, _, _ in chunks] + [0], np.int32)
    return jnp.asarray(slot), jnp.asarray(tile_sequence), jnp.asarray(positions), rows


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_ragged_prefill_continues_each_sequence_and_touches_no_other_slot(implementation):
    chunks = [(3, 0, 70), (1, 64, 130), (5, 10, 20), (2, 0, 1)]
    slot, tile_sequence, positions, rows = ragged(chunks, tiles=8)
    q, k, v = inputs(11, 8 * TILE)
    poisoned = np.asarray(positions) < 0
    q, k, v = (x.at[poisoned].set(jnp.nan) for x in (q, k, v))
    pool = jax.random.normal(jax.random.key(0), (7, HEADS, KEY, VALUE))
    pool = pool.at[jnp.array([0, 2, 3, 4])].set(jnp.nan)  # 2 and 3 start afresh, 4 is nobody's
    slopes = jnp.asarray(decay_slopes(HEADS))
    out, after = simple_gla_prefill(
        q, k, v, slopes, pool, slot, tile_sequence, positions, scale=SCALE, implementation=implementation
    )
    for (s, start, _), r in zip(chunks, rows):
        initial = None if start == 0 else pool[s]
        want, state = oracle(q[r], k[r], v[r], slopes, initial)
        np.testing.assert_allclose(out[r], want, rtol=3e-5, atol=3e-5)
        np.testing.assert_allclose(after[s], state, rtol=3e-5, atol=3e-5)
    np.testing.assert_array_equal(after[jnp.array([4, 6])], pool[jnp.array([4, 6])])


@settings(max_examples=12)
@given(length=st.integers(65, 300), data=st.data())
def test_cutting_on_the_grid_changes_no_bit(length, data):
    cuts = data.draw(st.sets(st.integers(1, (length - 1) // TILE)))
    q, k, v = inputs(length, length)
    slopes = jnp.asarray(decay_slopes(HEADS))

    def run(bounds):
        pool = jnp.full((2, HEADS, KEY, VALUE), jnp.nan)
        outs = []
        for start, end in zip(bounds, bounds[1:]):
            tiles = -(-length // TILE)
            slot, tile_sequence, positions, (r,) = ragged([(1, start, end)], tiles)
            padded = [jnp.zeros((tiles * TILE, *x.shape[1:])).at[r].set(x[start:end]) for x in (q, k, v)]
            out, pool = simple_gla_prefill(*padded, slopes, pool, slot, tile_sequence, positions, scale=SCALE)
            outs.append(out[r])
        return jnp.concatenate(outs), pool[1]

    whole = run([0, length])
    cut = run([0, *sorted(c * TILE for c in cuts), length])
    np.testing.assert_array_equal(whole[0], cut[0])
    np.testing.assert_array_equal(whole[1], cut[1])


def test_decode_steps_equal_the_recurrence_and_spare_other_slots():
    q, k, v = inputs(5, 3, 20)
    slopes = jnp.asarray(decay_slopes(HEADS))
    pool = jnp.full((6, HEADS, KEY, VALUE), jnp.nan).at[5].set(7.0)
    slot = jnp.array([4, 1, 0], jnp.int32)  # the third row is padding
    for t in range(20):
        positions = jnp.array([t, t, -1], jnp.int32)
        out, pool = simple_gla_decode(q[:, t], k[:, t], v[:, t], slopes, pool, slot, positions, scale=SCALE)
        for row in range(2):
            want = oracle(q[row, : t + 1], k[row, : t + 1], v[row, : t + 1], slopes)
            np.testing.assert_allclose(out[row], want[0][-1], rtol=2e-5, atol=2e-5)
    np.testing.assert_array_equal(pool[5], jnp.full_like(pool[5], 7.0))
    assert np.isnan(pool[jnp.array([2, 3])]).all()


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_a_prefill_reads_another_slot_and_leaves_snapshots(implementation):
    """Sequence 0 resumes from slot 4 and leaves its state after 192 in slot 5; sequence 1 leaves 64 in 6."""
    chunks = [(1, 128, 200), (2, 0, 130)]
    slot, tile_sequence, positions, rows = ragged(chunks, tiles=6)
    q, k, v = inputs(13, 6 * TILE)
    pool = jax.random.normal(jax.random.key(1), (8, HEADS, KEY, VALUE))
    pool = pool.at[jnp.array([0, 1, 2])].set(jnp.nan)
    slopes = jnp.asarray(decay_slopes(HEADS))
    out, after = simple_gla_prefill(
        q,
        k,
        v,
        slopes,
        pool,
        slot,
        tile_sequence,
        positions,
        scale=SCALE,
        initial_slot=jnp.array([4, 2, 0], jnp.int32),
        snapshot_slot=jnp.array([5, 0, 6, 0, 0, 0], jnp.int32),
        implementation=implementation,
    )
    for (s, start, _), r, source in zip(chunks, rows, [pool[4], None]):
        want, state = oracle(q[r], k[r], v[r], slopes, source)
        np.testing.assert_allclose(out[r], want, rtol=3e-5, atol=3e-5)
        np.testing.assert_allclose(after[s], state, rtol=3e-5, atol=3e-5)
        _, kept = oracle(q[r[:64]], k[r[:64]], v[r[:64]], slopes, source)
        np.testing.assert_allclose(after[5 if start else 6], kept, rtol=3e-5, atol=3e-5)
    untouched = jnp.array([3, 4, 7])
    np.testing.assert_array_equal(after[untouched], pool[untouched])


def test_a_partial_tile_leaves_no_snapshot():
    slot, tile_sequence, positions, _ = ragged([(1, 0, 40)], tiles=1)
    q, k, v = inputs(14, TILE)
    pool = jnp.zeros((4, HEADS, KEY, VALUE))
    for implementation in ("reference", "xla"):
        _, after = simple_gla_prefill(
            q,
            k,
            v,
            jnp.asarray(decay_slopes(HEADS)),
            pool,
            slot,
            tile_sequence,
            positions,
            scale=SCALE,
            snapshot_slot=jnp.array([3], jnp.int32),
            implementation=implementation,
        )
        np.testing.assert_array_equal(after[3], pool[3])
