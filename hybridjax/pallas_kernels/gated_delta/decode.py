"""One token of the gated delta rule per sequence, states updated in place; see ops.gated_delta."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from hybridjax.pallas_kernels import state_update
from hybridjax.pallas_kernels.state_update import (
    SIZE,
    Tuning,
    by_column,
    by_row,
    load_key,
    load_value,
    multiprocessors,
)

_NORM_EPS = 1e-6


def _unit(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.sum(x * x) + _NORM_EPS)


@functools.partial(jax.jit, static_argnames=("tuning", "interpret"))
def decode(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    pool: jax.Array,
    slot: jax.Array,
    positions: jax.Array,
    *,
    tuning: Tuning | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """As ops.gated_delta_decode for q, k [B, Hk, 128], v [B, Hv, 128] and a float32 pool [.., Hv, 128, 128].

    Rows with position -1 give zeros and touch no slot. Live rows must have distinct slots.
    """
    share = v.shape[1] // k.shape[1]  # value heads per key head

    cores = multiprocessors()
    chosen = state_update.choose("gated_delta_decode", v.shape[0], v.shape[1], cores, tuning)
    columns = chosen.columns

    def load(refs, row, head, own):
        q_ref, k_ref, v_ref, g_ref, beta_ref = refs
        key_head = jax.lax.div(head, jnp.int32(share))
        g, beta = g_ref[row, head], beta_ref[row, head]
        q, k = load_key(q_ref.at[row, key_head]), load_key(k_ref.at[row, key_head])
        return q, k, load_value(v_ref.at[row, head, own]), g, beta

    def prepare(loaded):
        q, k, v, g, beta = loaded
        q, k = _unit(q) * SIZE**-0.5, _unit(k)
        return q, k, jnp.sum(q * k), v, jnp.exp(g), beta

    def advance(loaded, state):
        q, k, alike, v, decay, beta = loaded
        # Both reads of the decayed state in one pass: q^T (S + k d^T) = q^T S + (q^T k) d^T.
        known, seen = (decay * jnp.sum(by_row(x, columns) * state, axis=0) for x in (k, q))
        delta = beta * (v - known)
        state = decay * state + by_row(k, columns) * by_column(delta, columns)
        return seen + alike * delta, state

    return state_update.update(
        "gated_delta_decode",
        load,
        advance,
        (q, k, v, g, beta),
        pool,
        slot,
        positions,
        tuning=chosen,
        multiprocessors=cores,
        prepare=prepare,
        interpret=interpret,
    )
