"""Writing rows to their places in a pool."""

from typing import Any

import jax
import jax.numpy as jnp


def write_rows(
    pool: jax.Array, wanted: jax.Array, rows: jax.Array, index: jax.Array, *rest: Any
) -> jax.Array:
    """``pool.at[index, *rest].set(rows)`` for rows that are wanted and have distinct places.

    On a GPU, rows that nobody wants would queue up if they were all written to one place, and 16-bit numbers
    are exchanged in a loop unless XLA is told that no two writes meet.

    Args:
      pool: [entries, ...].
      wanted: bool[N]; other rows are dropped.
      rows: [N, ...], cast to the dtype of the pool.
      index: int32[N] entries; with ``rest`` no two of wanted rows are the same.
      rest: indices of further axes, int32[N] or slices.
    """
    nowhere = pool.shape[0] + jnp.arange(index.shape[0], dtype=jnp.int32)
    place = (jnp.where(wanted, index, nowhere), *rest)
    return pool.at[place].set(rows.astype(pool.dtype), mode="drop", unique_indices=True)
