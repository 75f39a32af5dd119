"""history() against a plain Python model over random ragged schedules of prefill and decode steps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridjax.batch import TILE, Batch, Mode
from hybridjax.ops import history

SLOTS, SIZE, TILES, SEQUENCES, OFFSETS = 8, 5, 6, 3, (5, 2, 1)
_STEP = jax.jit(history, static_argnames=("offsets", "fill"))


def prefill_batch(chunks, *, tiles=TILES, sequences=SEQUENCES, initial=None, snapshots=None):
    """A PREFILL batch of (slot, start, end) chunks, and the rows of each."""
    positions = np.full(tiles * TILE, -1, np.int32)
    tile_sequence = np.full(tiles, sequences - 1, np.int32)  # padding tiles belong to a padding sequence
    rows, tile = [], 0
    for i, (_, start, end) in enumerate(chunks):
        first = tile
        for grid in range(start // TILE, -(-end // TILE)):
            low, high = max(start, grid * TILE), min(end, (grid + 1) * TILE)
            base = (tile - grid) * TILE
            positions[base + low : base + high] = np.arange(low, high)
            tile_sequence[tile] = i
            tile += 1
        rows.append(first * TILE + start % TILE + np.arange(end - start))
    slot = np.zeros(sequences, np.int32)
    slot[: len(chunks)] = [s for s, _, _ in chunks]
    source = slot.copy()
    for i, s in (initial or {}).items():
        source[i] = s
    snapshot = np.zeros(tiles, np.int32)
    for t, s in (snapshots or {}).items():
        snapshot[t] = s
    batch = Batch(
        tokens=jnp.zeros(tiles * TILE, jnp.int32),
        positions=jnp.asarray(positions),
        tile_sequence=jnp.asarray(tile_sequence),
        context_length=jnp.zeros(sequences, jnp.int32),
        slot=jnp.asarray(slot),
        initial_slot=jnp.asarray(source),
        snapshot_slot=jnp.asarray(snapshot),
        page_table=jnp.zeros((sequences, 0), jnp.int32),
        logit_rows=jnp.zeros(0, jnp.int32),
        mode=Mode.PREFILL,
    )
    return batch, rows


def decode_batch(slot, positions):
    empty = jnp.zeros(0, jnp.int32)
    return Batch(
        tokens=jnp.zeros(len(slot), jnp.int32),
        positions=jnp.asarray(positions, jnp.int32),
        tile_sequence=empty,
        context_length=jnp.zeros(len(slot), jnp.int32),
        slot=jnp.asarray(slot, jnp.int32),
        page_table=jnp.zeros((len(slot), 0), jnp.int32),
        logit_rows=empty,
        mode=Mode.DECODE,
    )


def before(values, position, offset, fill):
    """The value ``offset`` before a position of one sequence."""
    return values[position - offset] if position >= offset else np.full_like(values[0], fill)


def kept(values, length, fill):
    """The last SIZE values of a sequence of some length, oldest first."""
    return np.stack([before(values, length, SIZE - j, fill) for j in range(SIZE)])


@settings(max_examples=25)
@given(data=st.data(), fill=st.sampled_from([0.0, 7.0]))
def test_any_schedule_sees_the_earlier_rows_of_each_sequence(data, fill):
    """Three sequences in changing order, prefilled in chunks that start on the grid, then decoded."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**16)))
    lengths = [data.draw(st.integers(1, 200)) for _ in range(3)]
    slots = list(rng.permutation(np.arange(1, SLOTS - 1))[:3])
    values = [rng.standard_normal((n + 4, 2)).astype(np.float32) for n in lengths]
    pool = jnp.full((SLOTS, SIZE, 2), jnp.nan)
    done = [0, 0, 0]
    while any(d < n for d, n in zip(done, lengths)):
        ready = [i for i in range(3) if done[i] < lengths[i]]
        ready = data.draw(st.permutations(ready))[: data.draw(st.integers(1, SEQUENCES - 1))]
        chunks, room = [], TILES
        for i in ready:
            most = -(-(lengths[i] - done[i]) // TILE)
            tiles = data.draw(st.integers(1, min(most, room - (len(ready) - len(chunks) - 1))))
            room -= tiles
            chunks.append((slots[i], done[i], min(lengths[i], done[i] + tiles * TILE)))
        batch, rows = prefill_batch(chunks)
        x = np.full((TILES * TILE, 2), np.nan, np.float32)
        for i, (_, start, end), r in zip(ready, chunks, rows):
            x[r] = values[i][start:end]
        found, after = _STEP(jnp.asarray(x), batch, pool, OFFSETS, fill=fill)
        for i, (slot, start, end), r in zip(ready, chunks, rows):
            for offset, got in zip(OFFSETS, found):
                want = [before(values[i], p, offset, fill) for p in range(start, end)]
                np.testing.assert_array_equal(got[r], want)
            np.testing.assert_array_equal(after[slot], kept(values[i], end, fill))
            done[i] = end
        others = sorted(set(range(1, SLOTS)) - {slot for slot, _, _ in chunks})
        np.testing.assert_array_equal(after[np.array(others)], pool[np.array(others)])
        pool = after.at[0].set(jnp.nan)
    for step in range(4):
        order = data.draw(st.permutations(range(3)))
        x = np.stack([values[i][lengths[i] + step] for i in order] + [np.full(2, np.nan, np.float32)])
        batch = decode_batch([slots[i] for i in order] + [0], [lengths[i] + step for i in order] + [-1])
        found, pool = _STEP(jnp.asarray(x), batch, pool, OFFSETS, fill=fill)
        for row, i in enumerate(order):
            position = lengths[i] + step
            for offset, got in zip(OFFSETS, found):
                np.testing.assert_array_equal(got[row], before(values[i], position, offset, fill))
            np.testing.assert_array_equal(pool[slots[i]], kept(values[i], position + 1, fill))
        pool = pool.at[0].set(jnp.nan)


def test_decoding_from_the_first_token_ignores_what_the_slot_held():
    pool = jnp.full((SLOTS, SIZE, 2), jnp.nan)
    values = np.arange(16, dtype=np.float32).reshape(8, 2)
    for position in range(8):
        x, batch = jnp.asarray(values[position : position + 1]), decode_batch([3], [position])
        found, pool = _STEP(x, batch, pool, OFFSETS, fill=-1.0)
        for offset, got in zip(OFFSETS, found):
            np.testing.assert_array_equal(got[0], before(values, position, offset, -1.0))
        assert pool is not None
        np.testing.assert_array_equal(pool[3], kept(values, position + 1, -1.0))
    untouched = np.array([1, 2, 4, 5, 6, 7])
    assert np.isnan(pool[untouched]).all()


def test_a_prefill_starts_from_another_slot_and_leaves_snapshots_of_full_tiles():
    rng = np.random.default_rng(0)
    first, second = (rng.standard_normal((200, 2)).astype(np.float32) for _ in range(2))
    # Rows 128.. of the first resume from slot 4; its full tile leaves a snapshot, the partial one none.
    chunks = [(1, 128, 194), (2, 0, 130)]
    batch, rows = prefill_batch(chunks, initial={0: 4}, snapshots={0: 5, 1: 7, 2: 6})
    pool = jnp.full((SLOTS, SIZE, 2), jnp.nan).at[4].set(kept(first, 128, 0)).at[7].set(3.0)
    x = np.full((TILES * TILE, 2), np.nan, np.float32)
    x[rows[0]], x[rows[1]] = first[128:194], second[:130]
    found, after = _STEP(jnp.asarray(x), batch, pool, OFFSETS)
    for offset, got in zip(OFFSETS, found):
        np.testing.assert_array_equal(got[rows[0]], [before(first, p, offset, 0) for p in range(128, 194)])
        np.testing.assert_array_equal(got[rows[1]], [before(second, p, offset, 0) for p in range(130)])
    np.testing.assert_array_equal(after[1], kept(first, 194, 0))
    np.testing.assert_array_equal(after[2], kept(second, 130, 0))
    np.testing.assert_array_equal(after[5], kept(first, 192, 0))
    np.testing.assert_array_equal(after[6], kept(second, 64, 0))
    np.testing.assert_array_equal(after[np.array([3, 4, 7])], pool[np.array([3, 4, 7])])


@settings(max_examples=25)
@given(data=st.data())
def test_chunks_may_start_and_end_anywhere_in_a_tile(data):
    """Up to three sequences go on where others stopped, some before as many tokens as are looked back at."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**16)))
    chunks, values, tiles = [], [], TILES
    for i in range(data.draw(st.integers(1, SEQUENCES))):
        start = data.draw(st.integers(0, 6) | st.integers(0, 200))
        room = tiles - (SEQUENCES - i - 1)
        last = min(start + 150, (start // TILE + room) * TILE)
        end = data.draw(st.integers(start + 1, last))
        tiles -= -(-end // TILE) - start // TILE
        chunks.append((i + 1, start, end))
        values.append(rng.standard_normal((end, 2)).astype(np.float32))
    source = {i: i + 4 for i in range(len(chunks)) if data.draw(st.booleans())}
    batch, rows = prefill_batch(chunks, initial=source)
    pool, x = jnp.full((SLOTS, SIZE, 2), jnp.nan), np.full((TILES * TILE, 2), np.nan, np.float32)
    for i, (slot, start, end) in enumerate(chunks):
        x[rows[i]] = values[i][start:end]
        held = kept(values[i], start, np.nan) if start else np.full((SIZE, 2), np.nan)
        pool = pool.at[source.get(i, slot)].set(held)
    found, after = _STEP(jnp.asarray(x), batch, pool, OFFSETS, fill=7.0)
    for (slot, start, end), mine, r in zip(chunks, values, rows):
        for offset, got in zip(OFFSETS, found):
            np.testing.assert_array_equal(got[r], [before(mine, p, offset, 7.0) for p in range(start, end)])
        np.testing.assert_array_equal(after[slot], kept(mine, end, 7.0))
    others = np.arange(len(chunks) + 1, SLOTS)
    np.testing.assert_array_equal(after[others], pool[others])


def test_token_ids_keep_their_type_and_fill():
    """The n-gram window: int32 rows without further axes, an id before the start."""
    batch, rows = prefill_batch([(1, 0, 70)])
    ids = np.arange(100, 170, dtype=np.int32)
    x = jnp.zeros(TILES * TILE, jnp.int32).at[rows[0]].set(ids)
    found, pool = _STEP(x, batch, jnp.full((SLOTS, 2), -5, jnp.int32), (1, 2), fill=9)
    np.testing.assert_array_equal(found[0][rows[0]], [9, *ids[:-1]])
    np.testing.assert_array_equal(found[1][rows[0]], [9, 9, *ids[:-2]])
    assert pool is not None and pool.dtype == jnp.int32
    np.testing.assert_array_equal(pool[1], ids[-2:])
    found, pool = _STEP(jnp.array([170], jnp.int32), decode_batch([1], [70]), pool, (1, 2), fill=9)
    assert pool is not None and [int(f[0]) for f in found] == [169, 168]
    np.testing.assert_array_equal(pool[1], [169, 170])


@pytest.mark.parametrize("length", [1, 64, 100])
def test_whole_sequences_look_back_to_their_own_start(length):
    values = np.random.default_rng(length).standard_normal((2, length, 3)).astype(np.float32)
    batch = Batch.whole(jnp.zeros((2, length), jnp.int32))
    rows = np.flatnonzero(batch.positions >= 0)
    x = jnp.full((batch.tokens.shape[0], 3), jnp.nan).at[rows].set(values.reshape(-1, 3))
    found, pool = history(x, batch, None, (64, 3), fill=2.0)
    assert pool is None
    for offset, got in zip((64, 3), found):
        want = [before(values[b], p, offset, 2.0) for b in range(2) for p in range(length)]
        np.testing.assert_array_equal(got[rows], want)


def test_verification_is_refused():
    batch = Batch(**{**decode_batch([1], [0]).__dict__, "mode": Mode.VERIFY})
    with pytest.raises(NotImplementedError, match="VERIFY"):
        history(jnp.zeros((1, 2)), batch, jnp.zeros((2, 1, 2)), (1,))
