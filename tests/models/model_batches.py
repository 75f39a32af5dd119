"""Batches of one sequence, poisoned state and error measures, for the tests of all model families."""

import jax
import jax.numpy as jnp
import numpy as np

from hybridjax.batch import TILE, Batch, Mode


def relative_errors(got, want):
    """Per row, |got - want| / |want|."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return np.linalg.norm(got - want, axis=-1) / np.linalg.norm(want, axis=-1)


def relative_to_peak(got, want):
    return np.abs(np.asarray(got, np.float64) - want).max() / np.abs(want).max()


def poisoned_state(model, pages, slots):
    state = model.init_state(pages, slots)
    return jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), state)


def prefill_batch(ids, start, end, table, slot):
    tiles = -(-(end - start) // TILE)
    positions = np.full(tiles * TILE, -1, np.int32)
    positions[: end - start] = np.arange(start, end)
    tokens = np.zeros(tiles * TILE, np.int32)
    tokens[: end - start] = ids[start:end]
    return Batch(
        tokens=jnp.asarray(tokens),
        positions=jnp.asarray(positions),
        tile_sequence=jnp.zeros((tiles,), jnp.int32),
        context_length=jnp.array([end], jnp.int32),
        slot=jnp.array([slot], jnp.int32),
        page_table=table,
        logit_rows=jnp.zeros((1,), jnp.int32),
        mode=Mode.PREFILL,
    )


def decode_batch(token, position, table, slot):
    return Batch(
        tokens=jnp.array([token], jnp.int32),
        positions=jnp.array([position], jnp.int32),
        tile_sequence=jnp.zeros((0,), jnp.int32),
        context_length=jnp.array([position + 1], jnp.int32),
        slot=jnp.array([slot], jnp.int32),
        page_table=table,
        logit_rows=jnp.zeros((1,), jnp.int32),
        mode=Mode.DECODE,
    )
