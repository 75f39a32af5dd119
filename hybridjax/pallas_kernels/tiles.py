"""What the chunked prefill kernels share: their tuning, and which tiles of a ragged batch belong together."""

import jax
import jax.numpy as jnp

from hybridjax.batch import TILE
from hybridjax.ops.dispatch import architecture
from hybridjax.pallas_kernels import tuning
from hybridjax.pallas_kernels.state_update import multiprocessors


def choose(
    op: str, rows: int, sequences: int, heads: int, heuristic: tuning.Options, **given: int
) -> dict[str, int]:
    """The options of a prefill kernel, see ``tuning.choose``; of those given 0 means: as chosen there."""
    found = tuning.choose(
        op,
        architecture(),
        multiprocessors(),
        {"tokens": rows, "sequences": sequences, "heads": heads},
        heuristic=lambda: heuristic,
        override={name: number for name, number in given.items() if number},
    )
    return found.options  # pyright: ignore[reportReturnType]


def spans(positions: jax.Array, snapshot_slot: jax.Array | None) -> jax.Array:
    """int32[3, T]: first row of each tile that holds a token, the row behind the last, its snapshot slot.

    Args:
      positions: int32[N], -1 for padding.
      snapshot_slot: int32[T], taken as 0 where a tile's last row holds no token; None: all 0.
    """
    held = positions.reshape(-1, TILE) >= 0
    low = jnp.argmax(held, axis=1).astype(jnp.int32)
    snapshot = jnp.zeros_like(low) if snapshot_slot is None else snapshot_slot
    count = jnp.sum(held, axis=1, dtype=jnp.int32)
    return jnp.stack([low, low + count, jnp.where(held[:, -1], snapshot, 0)])


def describe(
    slot: jax.Array,
    tile_sequence: jax.Array,
    positions: jax.Array,
    initial_slot: jax.Array | None,
    snapshot_slot: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """A batch of prompt chunks; arguments as those of the prefill ops.

    A sequence's tiles stand side by side, those without tokens behind the others.

    Returns:
      int32[5, B]: first tile of each sequence, its tiles, those of them with tokens, the slot that its
      state comes from (-1: none, a zero state) and the slot that it goes to (0: nowhere); and ``spans``.
    """
    tiles = positions.reshape(-1, TILE)
    found = spans(positions, snapshot_slot)
    index = jnp.arange(tiles.shape[0], dtype=jnp.int32)
    mine = tile_sequence[None, :] == jnp.arange(slot.shape[0], dtype=jnp.int32)[:, None]
    live = mine & (found[1] > 0)[None, :]
    first = jnp.min(jnp.where(mine, index[None, :], tiles.shape[0]), axis=1)
    fresh = jnp.any(mine & jnp.any(tiles == 0, axis=1)[None, :], axis=1)
    alive = jnp.any(live, axis=1)
    source = jnp.where(fresh | ~alive, -1, slot if initial_slot is None else initial_slot)
    sequences = jnp.stack(
        [
            first,
            jnp.sum(mine, axis=1, dtype=jnp.int32),
            jnp.sum(live, axis=1, dtype=jnp.int32),
            source,
            jnp.where(alive, slot, 0),
        ]
    )
    return sequences, found
