"""Prompts of several sequences, in tiles."""

import jax.numpy as jnp
import numpy as np

from hybridjax.batch import TILE


def ragged(chunks, tiles):
    """Rows of (start, end) chunks in tiles: tile_sequence, positions, row numbers of each chunk."""
    positions = np.full(tiles * TILE, -1, np.int32)
    tile_sequence = np.full(tiles, len(chunks), np.int32)
    rows, tile = [], 0
    for i, (start, end) in enumerate(chunks):
        base = (tile - start // TILE) * TILE
        positions[base + start : base + end] = np.arange(start, end)
        rows.append(np.arange(base + start, base + end))
        last = tile + -(-end // TILE) - start // TILE
        tile_sequence[tile:last] = i
        tile = last
    return jnp.asarray(tile_sequence), jnp.asarray(positions), rows
