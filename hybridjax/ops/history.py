"""Earlier rows of the same sequence: what causal convolutions and n-gram windows look back at.

A pool keeps the last S rows of every sequence by slot, oldest first. Rows before a sequence's start read
as ``fill``, whatever the slot holds.
"""

import jax
import jax.numpy as jnp

from hybridjax.batch import TILE, Batch, Mode


def history(
    x: jax.Array, batch: Batch, pool: jax.Array | None, offsets: tuple[int, ...], *, fill: float = 0
) -> tuple[list[jax.Array], jax.Array | None]:
    """For each offset o, the row o tokens before each row, and the pool after the step.

    Args:
      x: [N, ...] one value per row of the batch.
      batch: WHOLE, PREFILL or DECODE.
      pool: [slots, S, ...] with S >= max(offsets); None in WHOLE mode. Slots not named by the batch are
        returned unchanged, slot 0 is scratch.
      offsets: how far to look back, each in 1..64.
      fill: what there is before the first token.

    Returns:
      one [N, ...] per offset, in the dtype of x (rows with position -1: meaningless), and the pool
      with the last S rows of every sequence of the batch, those before its start being ``fill``.
    """
    if batch.mode is Mode.WHOLE:
        return [_earlier(x, batch.positions, o, fill) for o in offsets], None
    assert pool is not None
    if batch.mode is Mode.DECODE:
        return _decode(x, batch, pool, offsets, fill)
    if batch.mode is Mode.PREFILL:
        return _prefill(x, batch, pool, offsets, fill)
    raise NotImplementedError(f"history in mode {batch.mode}")


def _where(condition, x, y):
    """jnp.where with the condition on the leading axes."""
    return jnp.where(condition.reshape(condition.shape + (1,) * (x.ndim - condition.ndim)), x, y)


def _earlier(x, positions, offset, fill):
    """x[row - offset]: rows of a sequence are neighbours, so only its start must be seen to."""
    shifted = jnp.concatenate([jnp.full((offset, *x.shape[1:]), fill, x.dtype), x[:-offset]])
    return _where(positions >= offset, shifted, jnp.asarray(fill, x.dtype))


def _decode(x, batch, pool, offsets, fill):
    size = pool.shape[1]
    slot = jnp.where(batch.positions < 0, 0, batch.slot)
    # Column j is the token size - j before this one.
    known = jnp.arange(size)[None, :] >= size - jnp.maximum(batch.positions, 0)[:, None]
    # Read once, before the pool is written: else XLA may read it later again, and write a copy of it.
    past = jax.lax.optimization_barrier(_where(known, pool[slot], jnp.asarray(fill, pool.dtype)))
    found = [past[:, size - o].astype(x.dtype) for o in offsets]
    last = jnp.concatenate([past[:, 1:], x[:, None].astype(pool.dtype)], axis=1)
    return found, pool.at[slot].set(last)


def _prefill(x, batch, pool, offsets, fill):
    size, rows = pool.shape[1], x.shape[0]
    positions = batch.positions
    sequence = batch.row_sequence
    slots = batch.slot.shape[0]
    top = jnp.iinfo(jnp.int32).max
    live = positions >= 0
    first = jnp.full((slots,), top, jnp.int32).at[sequence].min(jnp.where(live, positions, top))
    # The row of each sequence's first token, so that position p lies in row (origin + p).
    index = jnp.arange(rows, dtype=jnp.int32)
    origin = jnp.full((slots,), top, jnp.int32).at[sequence].min(jnp.where(live, index, top))
    # Read once, before the pool is written: else XLA may read it later again, and write a copy of it.
    initial = batch.slot if batch.initial_slot is None else batch.initial_slot
    earlier = jax.lax.optimization_barrier(pool[initial])

    def at(position, sequence):
        """The value at a position of a sequence, from the step, its slot, or before its start."""
        start = first[sequence]
        row = origin[sequence] + position - start
        inside = x[jnp.clip(row, 0, rows - 1)]
        column = size + position - start
        before = earlier[sequence, jnp.clip(column, 0, size - 1)].astype(x.dtype)
        found = _where(position >= start, inside, before)
        return _where(position >= 0, found, jnp.asarray(fill, x.dtype))

    found = [at(positions - o, sequence) for o in offsets]
    columns = jnp.arange(size, dtype=jnp.int32)[None, :] - size + 1

    last = jnp.full((slots,), -1, jnp.int32).at[sequence].max(positions)
    kept = at(last[:, None] + columns, jnp.arange(slots, dtype=jnp.int32)[:, None])
    target = jnp.where(last >= 0, batch.slot, 0)
    if batch.snapshot_slot is not None:
        ends = positions.reshape(-1, TILE)[:, -1]
        snapshots = at(ends[:, None] + columns, batch.tile_sequence[:, None])
        kept = jnp.concatenate([kept, snapshots])
        target = jnp.concatenate([target, jnp.where(ends >= 0, batch.snapshot_slot, 0)])
    return found, pool.at[target].set(kept.astype(pool.dtype))
