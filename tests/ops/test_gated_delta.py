"""The gated delta rule against a float64 recurrence: whole, ragged prefill, decode, and their agreement."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridjax.batch import TILE
from hybridjax.ops import gated_delta_decode, gated_delta_prefill, gated_delta_whole
from hybridjax.ops.gated_delta import _unit_lower_inverse

KEY_HEADS, HEADS, KEY, VALUE, TILES = 2, 4, 8, 6, 8
_WHOLE = jax.jit(gated_delta_whole, static_argnames="implementation")
_PREFILL = jax.jit(gated_delta_prefill, static_argnames="implementation")
_DECODE = jax.jit(gated_delta_decode)
IMPLEMENTATIONS = ["reference", "xla"]


def oracle(*arrays, initial=None):
    """The recurrence of one sequence in float64: q, k, v, g, beta [L, ...] -> outputs and final state."""
    q, k, v, g, beta = (np.asarray(x, np.float64) for x in arrays)
    group = v.shape[1] // k.shape[1]
    q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
    q, k = np.repeat(q, group, axis=1) / np.sqrt(q.shape[-1]), np.repeat(k, group, axis=1)
    state = np.zeros((v.shape[1], k.shape[2], v.shape[2])) if initial is None else np.array(initial, float)
    out = []
    for t in range(len(q)):
        state = np.exp(g[t])[:, None, None] * state
        delta = beta[t][:, None] * (v[t] - np.einsum("hk,hkv->hv", k[t], state))
        state = state + k[t][:, :, None] * delta[:, None, :]
        out.append(np.einsum("hk,hkv->hv", q[t], state))
    return np.array(out), state


def inputs(seed, *shape, key_heads=KEY_HEADS, heads=HEADS, key=KEY, value=VALUE):
    """Heads that forget at once, slowly and hardly, as A in (0, 16) and softplus make them."""
    rng = np.random.default_rng(seed)
    q, k = (rng.standard_normal((*shape, key_heads, key)) for _ in range(2))
    v = rng.standard_normal((*shape, heads, value))
    rate = np.geomspace(1e-3, 8.0, heads)
    g = -rate * np.log1p(np.exp(rng.standard_normal((*shape, heads))))
    beta = 1 / (1 + np.exp(-2 * rng.standard_normal((*shape, heads))))
    return [np.asarray(x, np.float32) for x in (q, k, v, g, beta)]


def close(got, want, peak_error=1e-5):
    want = np.asarray(want)
    assert np.max(np.abs(np.asarray(got, np.float64) - want)) <= peak_error * np.max(np.abs(want))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("length", [1, 63, 64, 65, 100])
def test_whole_sequences_equal_the_float64_recurrence(implementation, length):
    arrays = inputs(length, 2, length)
    out, final = _WHOLE(*arrays, implementation=implementation)
    assert out.dtype == final.dtype == jnp.float32
    for b in range(2):
        want, state = oracle(*(x[b] for x in arrays))
        close(out[b], want)
        close(final[b], state)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_long_sequences_of_released_head_sizes_stay_exact(implementation):
    arrays = inputs(1, 1, 2000, key_heads=1, heads=3, key=128, value=128)
    out, final = _WHOLE(*arrays, implementation=implementation)
    want, state = oracle(*(x[0] for x in arrays))
    for h in range(3):
        close(out[0, :, h], want[:, h])
        close(final[0, h], state[h])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_extreme_decays_neither_overflow_nor_leak(implementation):
    """No decay at all, total loss of memory at every token, and total loss among slow decays."""
    q, k, v, g, beta = inputs(0, 1, 150)
    g[..., 0], g[..., 1], g[..., 2], g[:, ::20, 2] = 0.0, -1e3, -0.01, -1e3
    beta[..., 0] = 1.0
    out, final = _WHOLE(q, k, v, g, beta, implementation=implementation)
    want, state = oracle(q[0], k[0], v[0], g[0], beta[0])
    for h in range(HEADS):
        close(out[0, :, h], want[:, h])
        close(final[0, h], state[h])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_repeated_keys_stay_exact(implementation):
    """The worst system to solve: every entry is one, and powers of it grow like binomials."""
    q, k, v, g, beta = inputs(2, 1, 130)
    k[:], g[:], beta[:] = k[:, :1], 0.0, 1.0
    out, final = _WHOLE(q, k, v, g, beta, implementation=implementation)
    want, state = oracle(q[0], k[0], v[0], g[0], beta[0])
    close(out[0], want)
    close(final[0], state)


def test_the_inverse_of_a_unit_triangle_is_exact_and_differentiable():
    rng = np.random.default_rng(0)
    a = np.tril(rng.uniform(-1, 1, (3, 64, 64)), -1).astype(np.float32) * 0.2
    want = np.linalg.inv(np.eye(64) + a.astype(np.float64))
    close(_unit_lower_inverse(jnp.asarray(a)), want, 1e-6)
    change = np.tril(rng.standard_normal(a.shape), -1).astype(np.float32)
    _, tangent = jax.jvp(_unit_lower_inverse, (jnp.asarray(a),), (jnp.asarray(change),))
    close(tangent, -want @ change @ want, 1e-5)


def test_bfloat16_inputs_are_computed_in_float32():
    q, k, v, g, beta = inputs(3, 1, 130)
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in (q, k, v))
    out, final = _WHOLE(q, k, v, g, beta)
    assert out.dtype == final.dtype == jnp.float32
    close(out[0], oracle(q[0], k[0], v[0], g[0], beta[0])[0])


def test_gradients_of_the_chunked_form_equal_those_of_the_definition():
    arrays = inputs(7, 2, 100)
    # A memory that is lost, and one that is not, must not make gradients of masked exponents infinite.
    arrays[3][:, ::7, 1], arrays[3][:, :, 0] = -1e3, 0.0

    @functools.partial(jax.jit, static_argnames="implementation")
    def gradients(arrays, implementation):
        def value(arrays):
            out, final = gated_delta_whole(*arrays, implementation=implementation)
            return jnp.sum(jnp.sin(3 * out)) + jnp.sum(jnp.cos(final))

        return jax.grad(value)(arrays)

    got, want = (gradients(arrays, name) for name in ("xla", "reference"))
    for name, x, y in zip("q k v g beta".split(), got, want, strict=True):
        assert np.isfinite(x).all(), name
        if np.max(np.abs(y)) > 1e-6:
            close(x, y)
        else:
            np.testing.assert_allclose(x, y, atol=1e-6, err_msg=name)


def ragged(chunks, tiles=TILES):
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
    return slot, tile_sequence, positions, rows


def spread(rows, arrays, *more, tiles=TILES):
    """Arrays of tokens in the rows of a batch, NaN in every other row; more: further (rows, arrays)."""
    out = [np.full((tiles * TILE, *x.shape[1:]), np.nan, np.float32) for x in arrays]
    for chosen, values in ((rows, arrays), *more):
        for x, value in zip(out, values):
            x[chosen] = value
    return out


def poison(arrays, positions):
    """NaN in every padding row."""
    return [np.where((positions < 0).reshape(-1, *[1] * (x.ndim - 1)), np.nan, x) for x in arrays]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_ragged_prefill_continues_each_sequence_and_touches_no_other_slot(implementation):
    chunks = [(3, 0, 70), (1, 64, 130), (5, 10, 20), (2, 0, 1)]
    slot, tile_sequence, positions, rows = ragged(chunks)
    arrays = poison(inputs(11, TILES * TILE), positions)
    pool = jax.random.normal(jax.random.key(0), (7, HEADS, KEY, VALUE))
    pool = pool.at[jnp.array([0, 2, 3, 4])].set(jnp.nan)  # 2 and 3 start afresh, 4 is nobody's
    out, after = _PREFILL(*arrays, pool, slot, tile_sequence, positions, implementation=implementation)
    for (s, start, _), r in zip(chunks, rows):
        want, state = oracle(*(x[r] for x in arrays), initial=None if start == 0 else pool[s])
        close(np.asarray(out)[r], want)
        close(after[s], state)
    np.testing.assert_array_equal(after[jnp.array([4, 6])], pool[jnp.array([4, 6])])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@settings(max_examples=8)
@given(length=st.integers(65, 300), data=st.data())
def test_cutting_on_the_grid_changes_no_bit(implementation, length, data):
    """Each part is prefilled beside another sequence, which comes before or after it."""
    cuts = data.draw(st.sets(st.integers(1, (length - 1) // TILE)))
    swap = data.draw(st.booleans())
    arrays, other = inputs(length, length), inputs(1, 70)

    def run(bounds, swap):
        pool = np.full((3, HEADS, KEY, VALUE), np.nan, np.float32)
        outs = []
        for start, end in zip(bounds, bounds[1:]):
            chunks = [(1, start, end), (2, 0, 70)]
            slot, tile_sequence, positions, rows = ragged(chunks[::-1] if swap else chunks)
            mine, others = rows[::-1] if swap else rows
            x = spread(mine, [a[start:end] for a in arrays], (others, other))
            out, pool = _PREFILL(*x, pool, slot, tile_sequence, positions, implementation=implementation)
            outs.append(np.asarray(out)[mine])
        return np.concatenate(outs), pool[1]

    whole = run([0, length], False)
    cut = run([0, *sorted(c * TILE for c in cuts), length], swap)
    np.testing.assert_array_equal(whole[0], cut[0])
    np.testing.assert_array_equal(whole[1], cut[1])


def test_fewer_tiles_give_the_same_bits():
    arrays = inputs(4, 4 * TILE)
    pool = jnp.zeros((2, HEADS, KEY, VALUE))
    slot, tile_sequence, positions, _ = ragged([(1, 0, 256)], tiles=4)
    out, after = _PREFILL(*arrays, pool, slot, tile_sequence, positions)
    parts = []
    for start in range(0, 256, TILE):
        slot, tile_sequence, positions, _ = ragged([(1, start, start + TILE)], tiles=1)
        part = [x[start : start + TILE] for x in arrays]
        got, pool = _PREFILL(*part, pool, slot, tile_sequence, positions)
        parts.append(got)
    np.testing.assert_array_equal(out, np.concatenate(parts))
    np.testing.assert_array_equal(after[1], pool[1])


def test_prefill_and_decode_equal_the_whole_sequence_and_spare_other_slots():
    arrays = inputs(5, 2, 110)
    pool = jnp.full((6, HEADS, KEY, VALUE), jnp.nan).at[5].set(7.0)
    slot, tile_sequence, positions, rows = ragged([(4, 0, 100)])
    x = spread(rows[0], [a[0, :100] for a in arrays])
    _, pool = _PREFILL(*x, pool, slot, tile_sequence, positions)
    want = [oracle(*(x[0] for x in arrays))[0][100:], oracle(*(x[1, :10] for x in arrays))[0]]
    slot = jnp.array([4, 1, 0], jnp.int32)  # the second starts by decoding, the third row is padding
    outs = []
    for t in range(10):
        row = [np.stack([x[0, 100 + t], x[1, t], np.full_like(x[0, 0], np.nan)]) for x in arrays]
        positions = jnp.array([100 + t, t, -1], jnp.int32)
        out, pool = _DECODE(*row, pool, slot, positions)
        outs.append(out)
    for i in range(2):
        close(np.stack(outs)[:, i], want[i])
    np.testing.assert_array_equal(pool[5], jnp.full_like(pool[5], 7.0))
    assert np.isnan(pool[jnp.array([2, 3])]).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_prefill_reads_another_slot_and_leaves_snapshots(implementation):
    """Sequence 0 resumes from slot 4 and leaves its state after 192 in slot 5; sequence 1 leaves 64 in 6."""
    chunks = [(1, 128, 200), (2, 0, 130)]
    slot, tile_sequence, positions, rows = ragged(chunks)
    arrays = poison(inputs(13, TILES * TILE), positions)
    pool = jax.random.normal(jax.random.key(1), (8, HEADS, KEY, VALUE))
    pool = pool.at[jnp.array([0, 1, 2])].set(jnp.nan)
    out, after = _PREFILL(
        *arrays,
        pool,
        slot,
        tile_sequence,
        positions,
        initial_slot=jnp.array([4, 2, 0], jnp.int32),
        snapshot_slot=jnp.array([5, 0, 6, 0, 0, 0, 0, 0], jnp.int32),
        implementation=implementation,
    )
    for (s, start, _), r, source in zip(chunks, rows, [pool[4], None]):
        want, state = oracle(*(x[r] for x in arrays), initial=source)
        close(np.asarray(out)[r], want)
        close(after[s], state)
        _, kept = oracle(*(x[r[:64]] for x in arrays), initial=source)
        close(after[5 if start else 6], kept)
    untouched = jnp.array([3, 4, 7])
    np.testing.assert_array_equal(after[untouched], pool[untouched])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_partial_tile_leaves_no_snapshot(implementation):
    slot, tile_sequence, positions, _ = ragged([(1, 0, 40)], tiles=1)
    pool = jnp.zeros((4, HEADS, KEY, VALUE))
    snapshot = jnp.array([3], jnp.int32)
    _, after = _PREFILL(
        *inputs(14, TILE),
        pool,
        slot,
        tile_sequence,
        positions,
        snapshot_slot=snapshot,
        implementation=implementation,
    )
    np.testing.assert_array_equal(after[3], pool[3])
    assert np.any(after[1] != 0)


def test_gradients_need_memory_linear_in_the_length():
    """Four times the length takes four times the scratch, less than one state per token."""

    def scratch(length):
        shapes = [(1, length, 1, 32)] * 3 + [(1, length, 1)] * 2
        arrays = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
        grad = jax.grad(lambda *x: jnp.sum(gated_delta_whole(*x)[0]), range(5))
        analysis = jax.jit(grad).lower(*arrays).compile().memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    short, long = scratch(1024), scratch(4096)
    assert long < 4.1 * short
    assert long < 0.7 * 4096 * 32 * 32 * 4
