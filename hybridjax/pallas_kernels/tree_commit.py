"""Commit of an accepted path of a draft tree to the live states, in place; see ops.tree.recurrent_commit."""

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


@functools.partial(jax.jit, static_argnames=("tuning", "interpret"))
def commit(
    k: jax.Array,
    d: jax.Array,
    g: jax.Array,
    pool: jax.Array,
    slot: jax.Array,
    positions: jax.Array,
    path: jax.Array,
    *,
    tuning: Tuning | None = None,
    interpret: Any = None,
) -> jax.Array:
    """As ops.recurrent_commit for k [B, N, Hk, 128], d [B, N, Hv, 128] and a float32 pool [.., Hv, 128, 128].

    Trees with paths must have distinct slots.
    """
    share = d.shape[2] // k.shape[2]
    heads, length = d.shape[2], path.shape[1]
    cores = multiprocessors()
    chosen = state_update.choose("recurrent_commit", path.shape[0], heads, cores, tuning)
    first = jnp.take_along_axis(positions, jnp.maximum(path[:, :1], 0), axis=1)[:, 0]

    def load(refs, row, head, own):
        k_ref, d_ref, g_ref, path_ref = refs
        key_head = jax.lax.div(head, jnp.int32(share))
        nodes = []
        for i in range(length):
            taken = path_ref[row, i] >= 0
            node = jnp.maximum(path_ref[row, i], 0)
            log_decay = g_ref[head] if len(g_ref.shape) == 1 else g_ref[row, node, head]
            key, value = load_key(k_ref.at[row, node, key_head]), load_value(d_ref.at[row, node, head, own])
            nodes.append((taken, key, value, log_decay))
        return nodes

    def advance(nodes, state):
        for taken, key, value, log_decay in nodes:
            key, value = (
                jnp.where(jax.lax.broadcast_in_dim(taken, x.shape, ()), x, 0.0) for x in (key, value)
            )
            decay = jnp.where(taken, jnp.exp(log_decay), 1.0)
            state = decay * state + by_row(key, chosen.columns) * by_column(value, chosen.columns)
        return 0.0 * nodes[0][2], state

    _, pool = state_update.update(
        "recurrent_commit",
        load,
        advance,
        (k, d, g, path),
        pool,
        slot,
        jnp.where(path[:, 0] >= 0, first, -1),
        tuning=chosen,
        multiprocessors=cores,
        interpret=interpret,
    )
    return pool
