"""The recurrent GPU kernels against float64 recurrences: interpreted on a CPU, compiled on a GPU."""

import jax.numpy as jnp
import numpy as np
import pytest
from interpreting import interpreted
from prompts import ragged

from hybridjax.batch import TILE
from hybridjax.pallas_kernels import gated_delta, simple_gla
from hybridjax.pallas_kernels.state_update import Tuning

pytestmark = pytest.mark.usefixtures("no_races")

HEADS, SIZE, SCALE = 2, 128, 0.09
SLOPES = np.array([0.7, 0.01], np.float32)
# A step that goes through several pieces per program, more of them than are in flight.
SMALL = Tuning(columns=64, stages=2, resident=1)


@pytest.fixture
def one_multiprocessor(monkeypatch):
    """Each program of a decode kernel then owns several pieces."""
    for module in (simple_gla.decode, gated_delta.decode, gated_delta.hopper):
        monkeypatch.setattr(module, "multiprocessors", lambda: 1)


def normal(seed, *shape, dtype=jnp.bfloat16):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def exact(*arrays):
    return [np.asarray(jnp.asarray(x).astype(jnp.float32), np.float64) for x in arrays]


def close(got, want, tolerance):
    """Every vector along the last axis is within ``tolerance`` of the largest of its kind."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    distance = np.linalg.norm(got - want, axis=-1)
    assert distance.max() <= tolerance * np.linalg.norm(want, axis=-1).max()


def simple_gla_token(state, q, k, v):
    state = np.exp(-SLOPES.astype(np.float64))[:, None, None] * state + k[:, :, None] * v[:, None, :]
    return state, SCALE * np.einsum("hk,hkv->hv", q, state)


def gated_delta_token(state, q, k, v, g, beta):
    q, k = (np.repeat(x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6), 3, axis=0) for x in (q, k))
    state = np.exp(g)[:, None, None] * state
    delta = beta[:, None] * (v - np.einsum("hk,hkv->hv", k, state))
    state = state + k[:, :, None] * delta[:, None, :]
    return state, SIZE**-0.5 * np.einsum("hk,hkv->hv", q, state)


def simple_gla_rows(seed, rows):
    return [normal(seed + i, rows, HEADS, SIZE) for i in range(3)]


def gated_delta_rows(seed, rows):
    q, k = (normal(seed + i, rows, 1, SIZE) for i in range(2))
    rng = np.random.default_rng(seed)
    gates = (-3 * rng.random((rows, 3)), rng.random((rows, 3)))
    return [q, k, normal(seed + 2, rows, 3, SIZE), *(jnp.asarray(x, jnp.float32) for x in gates)]


def run_simple_gla(rows, pool, slot, positions):
    return interpreted(simple_gla.decode.decode)(
        *rows, jnp.asarray(SLOPES), pool, slot, positions, scale=SCALE, tuning=SMALL
    )


def run_gated_delta(rows, pool, slot, positions):
    return interpreted(gated_delta.decode.decode)(*rows, pool, slot, positions, tuning=SMALL)


DECODE = {
    "simple_gla": (run_simple_gla, simple_gla_rows, simple_gla_token, HEADS),
    "gated_delta": (run_gated_delta, gated_delta_rows, gated_delta_token, 3),
}


@pytest.mark.parametrize("op", DECODE)
def test_one_token_in_place_touches_only_its_slots(op, one_multiprocessor):
    run, make, token, heads = DECODE[op]
    slot = jnp.array([4, 0, 6, 0, 2], jnp.int32)
    positions = jnp.array([0, -1, 9, -1, 1], jnp.int32)  # the first starts afresh, two are padding
    rows = [jnp.where((positions < 0).reshape(-1, *[1] * (x.ndim - 1)), jnp.nan, x) for x in make(3, 5)]
    pool = normal(9, 8, heads, SIZE, SIZE, dtype=jnp.float32).at[jnp.array([0, 1, 4, 7])].set(jnp.nan)
    out, after = run(rows, pool, slot, positions)
    values = exact(*rows)
    for row, (own, position) in enumerate(zip([4, 0, 6, 0, 2], [0, -1, 9, -1, 1])):
        if position < 0:
            np.testing.assert_array_equal(out[row], np.zeros_like(out[row]))
            continue
        before = np.zeros((heads, SIZE, SIZE)) if position == 0 else exact(pool[own])[0]
        state, want = token(before, *(x[row] for x in values))
        close(out[row], want, 1e-6)
        close(after[own], state, 1e-6)
    others = np.array([0, 1, 3, 5, 7])
    np.testing.assert_array_equal(after[others], pool[others])


@pytest.mark.parametrize("op", DECODE)
def test_a_row_does_not_depend_on_its_neighbours_or_the_tuning(op):
    run, make, _, heads = DECODE[op]
    rows = make(5, 3)
    pool = normal(1, 4, heads, SIZE, SIZE, dtype=jnp.float32)
    slot, positions = jnp.array([2, 3, 1], jnp.int32), jnp.array([5, 6, 7], jnp.int32)
    out, after = run(rows, pool, slot, positions)
    alone, pool_alone = run([x[1:2] for x in rows], pool, slot[1:2], positions[1:2])
    np.testing.assert_array_equal(alone[0], out[1])
    np.testing.assert_array_equal(pool_alone[3], after[3])


def simple_gla_prefill(rows, *batch, **options):
    run = interpreted(simple_gla.hopper.prefill)
    return run(*rows, jnp.asarray(SLOPES), *batch, scale=SCALE, **options)


def gated_delta_prefill(rows, *batch, **options):
    return interpreted(gated_delta.hopper.prefill)(*rows, *batch, **options)


PREFILL = {
    "simple_gla": (simple_gla_prefill, simple_gla_rows, simple_gla_token, HEADS),
    "gated_delta": (gated_delta_prefill, gated_delta_rows, gated_delta_token, 3),
}


@pytest.mark.parametrize("op", PREFILL)
def test_ragged_prefill_reads_slots_and_leaves_snapshots(op, one_multiprocessor):
    run, make, token, heads = PREFILL[op]
    chunks = [(128, 200), (0, 130), (10, 20)]
    tile_sequence, positions, where = ragged(chunks, tiles=7)  # the last one is empty
    padding = positions < 0
    rows = [jnp.where(padding.reshape(-1, *[1] * (x.ndim - 1)), jnp.nan, x) for x in make(2, 7 * TILE)]
    pool = normal(4, 10, heads, SIZE, SIZE, dtype=jnp.float32).at[jnp.array([0, 1, 2, 8])].set(jnp.nan)
    out, after = run(
        rows,
        pool,
        jnp.array([1, 2, 7, 0], jnp.int32),
        tile_sequence,
        positions,
        initial_slot=jnp.array([4, 2, 7, 0], jnp.int32),
        snapshot_slot=jnp.array([5, 0, 6, 0, 0, 0, 0], jnp.int32),
        stages=2,
    )
    values = exact(*rows)
    for (start, _), own, source, snapshot, row in zip(chunks, (1, 2, 7), (4, None, 7), (5, 6, None), where):
        state = np.zeros((heads, SIZE, SIZE)) if start == 0 else exact(pool[source])[0]
        want = []
        for i, n in enumerate(row):
            state, o = token(state, *(x[n] for x in values))
            want.append(o)
            if i == TILE - 1 and snapshot:
                close(after[snapshot], state, 5e-3)
        close(out[row], want, 5e-3)
        close(after[own], state, 5e-3)
    np.testing.assert_array_equal(out[padding], np.zeros_like(out[padding]))
    others = np.array([0, 3, 4, 8, 9])
    np.testing.assert_array_equal(after[others], pool[others])


@pytest.mark.parametrize("op", PREFILL)
def test_cutting_a_prompt_on_the_grid_changes_no_bit(op):
    run, make, _, heads = PREFILL[op]
    rows = make(8, 2 * TILE)
    pool = jnp.full((2, heads, SIZE, SIZE), jnp.nan)
    slot = jnp.array([1], jnp.int32)
    tile_sequence, positions = jnp.zeros((2,), jnp.int32), jnp.arange(2 * TILE, dtype=jnp.int32)
    whole, state = run(rows, pool, slot, tile_sequence, positions)
    pieces = []
    for tiles in (slice(0, 1), slice(1, 2)):
        part = slice(tiles.start * TILE, tiles.stop * TILE)
        out, pool = run([x[part] for x in rows], pool, slot, tile_sequence[tiles], positions[part])
        pieces.append(out)
    np.testing.assert_array_equal(jnp.concatenate(pieces), whole)
    np.testing.assert_array_equal(pool[1], state[1])


@pytest.mark.parametrize("options", [{}, {"stages": 2}, {"columns": 64, "stages": 2}])
def test_a_long_prompt_goes_round_all_buffers_which_are_even(options):
    tokens = 9 * TILE - 5
    rows = simple_gla_rows(11, 9 * TILE)
    index = jnp.arange(9 * TILE, dtype=jnp.int32)
    batch = jnp.array([1], jnp.int32), jnp.zeros((9,), jnp.int32), jnp.where(index < tokens, index, -1)
    out, after = simple_gla_prefill(rows, jnp.full((2, HEADS, SIZE, SIZE), jnp.nan), *batch, **options)
    state, want = np.zeros((HEADS, SIZE, SIZE)), []
    for token in zip(*(x[:tokens] for x in exact(*rows))):
        state, o = simple_gla_token(state, *token)
        want.append(o)
    close(out[:tokens], want, 5e-3)
    close(after[1], state, 5e-3)
    with pytest.raises(ValueError, match="3 stages"):
        simple_gla_prefill(rows, after, *batch, **{**options, "stages": 3})


@pytest.mark.parametrize("stages", [0, 2])
def test_corrections_of_a_long_prompt_go_round_all_buffers(stages, one_multiprocessor):
    tokens = 5 * TILE - 5
    rows = gated_delta_rows(14, 5 * TILE)
    index = jnp.arange(5 * TILE, dtype=jnp.int32)
    batch = jnp.array([1], jnp.int32), jnp.zeros((5,), jnp.int32), jnp.where(index < tokens, index, -1)
    out, after = gated_delta_prefill(rows, jnp.full((2, 3, SIZE, SIZE), jnp.nan), *batch, stages=stages)
    state, want = np.zeros((3, SIZE, SIZE)), []
    for token in zip(*(x[:tokens] for x in exact(*rows))):
        state, o = gated_delta_token(state, *token)
        want.append(o)
    close(out[:tokens], want, 5e-3)
    close(after[1], state, 5e-3)
    with pytest.raises(ValueError, match="stages must be 2"):
        gated_delta_prefill(rows, after, *batch, stages=1)


@pytest.mark.parametrize("op", PREFILL)
def test_a_batch_without_tokens_gives_zeros_and_touches_no_slot(op):
    run, make, _, heads = PREFILL[op]
    rows = [jnp.full_like(x, jnp.nan) for x in make(12, 2 * TILE)]
    pool = normal(13, 3, heads, SIZE, SIZE, dtype=jnp.float32)
    tile_sequence, positions = jnp.array([0, 1], jnp.int32), jnp.full((2 * TILE,), -1, jnp.int32)
    out, after = run(rows, pool, jnp.array([1, 0], jnp.int32), tile_sequence, positions)
    np.testing.assert_array_equal(out, np.zeros_like(out))
    np.testing.assert_array_equal(after, pool)


def one_tile(tokens):
    """A fresh sequence of one tile: pool, slot, tile_sequence, positions."""
    positions = jnp.where(jnp.arange(TILE) < tokens, jnp.arange(TILE), -1).astype(jnp.int32)
    return jnp.array([1], jnp.int32), jnp.zeros((1,), jnp.int32), positions


def test_extreme_decays_neither_overflow_nor_leak():
    rows = simple_gla_rows(6, TILE)
    pool = jnp.full((2, HEADS, SIZE, SIZE), jnp.nan)
    run = interpreted(simple_gla.hopper.prefill)
    slopes = jnp.array([0.0, 90.0], jnp.float32)
    out, after = run(*rows, slopes, pool, *one_tile(50), scale=SCALE)
    q, k, v = exact(*rows)
    close(after[1, 0], np.einsum("ck,cv->kv", k[:50, 0], v[:50, 0]), 5e-3)
    close(after[1, 1], np.outer(k[49, 1], v[49, 1]), 5e-3)
    close(out[:50, 1], SCALE * (q[:50, 1] * k[:50, 1]).sum(-1, keepdims=True) * v[:50, 1], 5e-3)


def test_extreme_decays_of_tokens_and_keys_that_are_all_alike():
    """A memory that is lost within a token, one that is kept, and the worst system to solve by a series."""
    q, k, v, g, beta = gated_delta_rows(6, TILE)
    k = jnp.broadcast_to(k[:1], k.shape)
    g = g.at[:, 0].set(0.0).at[::7, 1].set(-1e30).at[:, 2].set(-1e3)
    beta = jnp.ones_like(beta).at[:, 2].set(0.5)
    rows = (q, k, v, g, beta)
    out, after = gated_delta_prefill(rows, jnp.full((2, 3, SIZE, SIZE), jnp.nan), *one_tile(50))
    values, state, want = exact(*rows), np.zeros((3, SIZE, SIZE)), []
    for n in range(50):
        state, o = gated_delta_token(state, *(x[n] for x in values))
        want.append(o)
    for head, tolerance in enumerate((3e-2, 5e-3, 5e-3)):
        # Where nothing is forgotten the corrections of alike keys cancel, and the rounding of each remains.
        close(out[:50, head], np.array(want)[:, head], tolerance)
        close(after[1, head], state[head], tolerance)
