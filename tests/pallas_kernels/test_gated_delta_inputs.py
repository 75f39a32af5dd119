"""The kernel before the gated delta recurrence of a prompt, in float64 and across the cuts of a prompt."""

import jax.numpy as jnp
import numpy as np
import pytest
from interpreting import interpreted
from prompts import ragged

from hybridjax.batch import TILE, Batch, Mode
from hybridjax.pallas_kernels.pointwise import inputs

pytestmark = pytest.mark.usefixtures("no_races")

SIZE, KEY_HEADS, HEADS, TAPS = 128, 2, 4, 4
KEYS, CHANNELS = KEY_HEADS * SIZE, (2 * KEY_HEADS + HEADS) * SIZE
COLUMNS = CHANNELS + HEADS * SIZE + 2 * HEADS


def normal(seed, *shape, dtype=jnp.bfloat16):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def exact(x):
    return np.asarray(jnp.asarray(x).astype(jnp.float32), np.float64)


def prefill(chunks, tiles, slot, initial, snapshot):
    """A PREFILL of (start, end) chunks, sequences that have none behind them, and the rows of each chunk."""
    tile_sequence, positions, rows = ragged(chunks, tiles)
    batch = Batch(
        tokens=jnp.zeros((tiles * TILE,), jnp.int32),
        positions=positions,
        tile_sequence=tile_sequence,
        context_length=jnp.zeros((len(slot),), jnp.int32),
        slot=jnp.asarray(slot, jnp.int32),
        initial_slot=None if initial is None else jnp.asarray(initial, jnp.int32),
        snapshot_slot=None if snapshot is None else jnp.asarray(snapshot, jnp.int32),
        page_table=jnp.zeros((len(slot), 0), jnp.int32),
        logit_rows=jnp.zeros((0,), jnp.int32),
        mode=Mode.PREFILL,
    )
    return batch, rows


def weights(dtype):
    return (
        0.5 * normal(1, CHANNELS, 1, TAPS, dtype=dtype),
        normal(2, HEADS, dtype=jnp.float32),
        normal(3, HEADS, dtype=jnp.float32),
    )


def run(projected, batch, pool):
    options = {"key_heads": KEY_HEADS, "key_size": SIZE, "value_size": SIZE}
    return interpreted(inputs.gated_delta_inputs)(
        projected, *weights(projected.dtype), batch, pool, **options
    )


def formulas(projected, past, dtype):
    """q, k, v, g and beta in float64 of consecutive tokens, ``past`` [3, channels] before them."""
    weight, rate, bias = map(exact, weights(dtype))
    x = np.concatenate([past, projected[:, :CHANNELS]])
    mixed = sum(x[j : j + len(projected)] * weight[:, 0, j] for j in range(TAPS))
    mixed = mixed / (1 + np.exp(-mixed))
    beta, step = np.split(projected[:, -2 * HEADS :], 2, axis=1)
    heads = (part.reshape(len(x) - 3, -1, SIZE) for part in np.split(mixed, [KEYS, 2 * KEYS], axis=1))
    return *heads, -np.exp(rate) * np.logaddexp(0, step + bias), 1 / (1 + np.exp(-beta)), x


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_ragged_prompts_read_slots_and_leave_their_last_inputs(dtype):
    # After a snapshot in another slot and into a second tile; from inside a tile, two tokens after the start;
    # from the start; one token, so that two of the inputs that it leaves are older; a tile without tokens.
    chunks = [(128, 200), (2, 70), (0, 64), (191, 192)]
    own, source = [1, 2, 3, 7, 0], [4, 2, 3, 7, 0]
    snapshot = [
        5,
        9,
        6,
        9,
        10,
        8,
        0,
    ]  # the second and the fourth tile are not full
    batch, where = prefill(chunks, 7, own, source, snapshot)
    projected = jnp.where((batch.positions < 0)[:, None], jnp.nan, normal(5, 7 * TILE, COLUMNS, dtype=dtype))
    # What lies before a first token, in slot 0 and in slots of nobody must not show.
    pool = normal(6, 12, TAPS - 1, CHANNELS, dtype=dtype).at[jnp.array([0, 1, 3, 11])].set(jnp.nan)
    pool = pool.at[2, 0].set(jnp.nan)
    (q, k, v, g, beta), after = run(projected, batch, pool)
    assert {x.dtype for x in (q, k, v)} == {jnp.dtype(dtype)} and g.dtype == beta.dtype == jnp.float32
    left = np.asarray(pool.astype(jnp.float32), np.float64)
    for (start, _), slot, other, rows in zip(chunks, own, source, where):
        past = np.where(np.arange(start - 3, start)[:, None] >= 0, exact(pool[other]), 0.0)
        *want, x = formulas(exact(projected)[rows], past, dtype)
        for got, right in zip((q, k, v, g, beta), want):
            assert np.abs(exact(got)[rows] - right).max() <= 0.005 * np.abs(right).max()
        left[slot] = x[-3:]
        for tile, taken in enumerate(snapshot):
            if taken and tile * TILE + TILE - 1 in rows:
                end = np.flatnonzero(rows == tile * TILE + TILE - 1)[0] + 1
                left[taken] = x[end : end + 3]
    np.testing.assert_array_equal(exact(after)[1:], left[1:])


@pytest.mark.parametrize(("start", "end"), [(127, 129), (62, 130)])
def test_what_lies_before_a_first_tile_of_one_or_two_tokens_counts_in_the_next(start, end):
    batch, (rows,) = prefill([(start, end)], 3, [1, 0], None, None)
    projected = jnp.full((3 * TILE, COLUMNS), jnp.nan, jnp.bfloat16)
    projected = projected.at[rows].set(normal(5, len(rows), COLUMNS))
    pool = normal(6, 4, TAPS - 1, CHANNELS)
    (q, k, v, *_), after = run(projected, batch, pool)
    *want, _, _, x = formulas(exact(projected)[rows], exact(pool[1]), jnp.bfloat16)
    for got, right in zip((q, k, v), want):
        assert np.abs(exact(got)[rows] - right).max() <= 0.005 * np.abs(right).max()
    np.testing.assert_array_equal(exact(after[1]), x[-3:])


def test_cutting_a_prompt_on_the_grid_changes_no_bit():
    tokens, tiles = 2 * TILE + 9, 3
    projected, pool = normal(7, tiles * TILE, COLUMNS), normal(8, 3, TAPS - 1, CHANNELS)
    batch, _ = prefill([(0, tokens)], tiles, [1, 0], None, None)
    whole, after = run(projected, batch, pool)
    for cut in (TILE, 2 * TILE):
        parts, kept = [], pool
        for start, end in ((0, cut), (cut, tokens)):
            batch, (rows,) = prefill([(start, end)], 2, [1, 0], None, None)
            held = jnp.full((2 * TILE, COLUMNS), jnp.nan, jnp.bfloat16).at[rows].set(projected[start:end])
            found, kept = run(held, batch, kept)
            parts.append([x[rows] for x in found])
        for one, two, all_rows in zip(*parts, whole):
            np.testing.assert_array_equal(exact(jnp.concatenate([one, two])), exact(all_rows[:tokens]))
        np.testing.assert_array_equal(exact(kept), exact(after))


def test_a_batch_without_tokens_touches_no_slot():
    pool = normal(9, 3, TAPS - 1, CHANNELS).at[1].set(jnp.nan)
    batch, _ = prefill([], 1, [1, 2], None, [2])
    _, after = run(jnp.full((TILE, COLUMNS), jnp.nan, jnp.bfloat16), batch, pool)
    np.testing.assert_array_equal(exact(after), exact(pool))
