"""Earlier rows of the same sequence: what causal convolutions and n-gram windows look back at.

A pool keeps the last S rows of every sequence by slot, oldest first. Rows before a sequence's start read
as ``fill``, whatever the slot holds.
"""

import jax
import jax.numpy as jnp

from hybridjax.batch import TILE, Batch, Mode
from hybridjax.ops.scatter import write_rows

_TOP = jnp.iinfo(jnp.int32).max


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


def bounds(batch: Batch) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Where the sequences of a PREFILL stand.

    Returns:
      int32[B] each: the first and the last position of a sequence in the batch (the largest int32 and -1:
      it has none), and the row at which position 0 would be: position p is in row ``base + p``.
    """
    tiles = batch.positions.reshape(-1, TILE)
    held = tiles >= 0
    mine = batch.tile_sequence[None, :] == jnp.arange(batch.slot.shape[0], dtype=jnp.int32)[:, None]
    first = jnp.min(jnp.where(held, tiles, _TOP), axis=1)
    last = jnp.max(tiles, axis=1)
    number = jnp.arange(tiles.shape[0], dtype=jnp.int32)
    base = TILE * jnp.where(last >= 0, number - last // TILE, _TOP // TILE)
    least = [jnp.min(jnp.where(mine, x[None, :], _TOP), axis=1) for x in (first, base)]
    return least[0], jnp.max(jnp.where(mine, last[None, :], -1), axis=1), least[1]


def rows_before(batch: Batch, pool: jax.Array, first: jax.Array, *, fill: float = 0) -> jax.Array:
    """[B, S, ...]: what a PREFILL finds in the pool, the S rows before each sequence's ``first`` position.

    They are read once, before the pool is written: else XLA may read it later again, and write a copy of it.
    """
    initial = batch.slot if batch.initial_slot is None else batch.initial_slot
    size = pool.shape[1]
    known = first[:, None] >= size - jnp.arange(size, dtype=jnp.int32)[None, :]
    return jax.lax.optimization_barrier(_where(known, pool[initial], jnp.asarray(fill, pool.dtype)))


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
    return found, write_rows(pool, slot > 0, last, slot)


def _prefill(x, batch, pool, offsets, fill):
    size, rows = pool.shape[1], x.shape[0]
    positions = batch.positions
    first, last, base = bounds(batch)
    before = rows_before(batch, pool, first, fill=fill)

    def at(position, sequence):
        """The value at a position of a sequence, from the step, its slot, or before its start."""
        inside = x[jnp.clip(base[sequence] + position, 0, rows - 1)]
        column = size + position - first[sequence]
        return _where(column >= size, inside, before[sequence, jnp.clip(column, 0, size - 1)].astype(x.dtype))

    # Shifting all rows by o and looking for those at a start alone takes XLA on a GPU as long as this.
    found = [at(positions - o, batch.row_sequence) for o in offsets]
    columns = jnp.arange(size, dtype=jnp.int32)[None, :] - size + 1
    kept = at(last[:, None] + columns, jnp.arange(batch.slot.shape[0], dtype=jnp.int32)[:, None])
    target = jnp.where(last >= 0, batch.slot, 0)
    if batch.snapshot_slot is not None:
        ends = positions.reshape(-1, TILE)[:, -1]
        kept = jnp.concatenate([kept, at(ends[:, None] + columns, batch.tile_sequence[:, None])])
        target = jnp.concatenate([target, jnp.where(ends >= 0, batch.snapshot_slot, 0)])
    return found, write_rows(pool, target > 0, kept, target)
