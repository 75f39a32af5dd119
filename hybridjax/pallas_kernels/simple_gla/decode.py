"""One token of SimpleGLA per sequence, states updated in place; see ops.simple_gla for the definition."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from hybridjax.pallas_kernels import state_update
from hybridjax.pallas_kernels.state_update import (
    Tuning,
    by_column,
    by_row,
    load_key,
    load_value,
    multiprocessors,
)


def advance(loaded: tuple, state: jax.Array, *, scale: float) -> tuple[jax.Array, jax.Array]:
    """The output of a token and the columns of a state after it, [columns] and [128, columns].

    ``loaded``: q and k [128], v [columns] and the decay.
    """
    q, k, v, decay = loaded
    columns = state.shape[1]
    state = decay * state + by_row(k, columns) * by_column(v, columns)
    return jnp.sum(by_row(scale * q, columns) * state, axis=0), state


@functools.partial(jax.jit, static_argnames=("scale", "tuning", "interpret"))
def decode(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    slopes: jax.Array,
    pool: jax.Array,
    slot: jax.Array,
    positions: jax.Array,
    *,
    scale: float,
    tuning: Tuning | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """As ops.simple_gla_decode for q, k, v [B, H, 128] and a float32 pool [slots, H, 128, 128].

    Rows with position -1 give zeros and touch no slot. Live rows must have distinct slots.
    """

    cores = multiprocessors()
    chosen = state_update.choose("simple_gla_decode", v.shape[0], v.shape[1], cores, tuning)

    def load(refs, row, head, own):
        q_ref, k_ref, v_ref, slopes_ref = refs
        return (
            load_key(q_ref.at[row, head]),
            load_key(k_ref.at[row, head]),
            load_value(v_ref.at[row, head, own]),
            jnp.exp(-slopes_ref[head]),
        )

    return state_update.update(
        "simple_gla_decode",
        load,
        functools.partial(advance, scale=scale),
        (q, k, v, slopes),
        pool,
        slot,
        positions,
        tuning=chosen,
        multiprocessors=cores,
        interpret=interpret,
    )
