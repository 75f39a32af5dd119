"""Whole sequences through the prefill kernels, for training: forward by a kernel, gradients by XLA.

Only the inputs are kept for the backward pass, which runs the chunked XLA form again and differentiates it:
the memory of one layer's backward pass is linear in the length, and between the passes nothing is stored.
Inside a jax.checkpoint within a scan they cannot be used: JAX would want to keep the reference to the pool.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from hybridjax.batch import TILE
from hybridjax.ops import gated_delta as delta_op
from hybridjax.ops import simple_gla as simple_op
from hybridjax.pallas_kernels.gated_delta import hopper as delta
from hybridjax.pallas_kernels.simple_gla import hopper as simple


def _run(prefill: Callable[..., tuple[jax.Array, jax.Array]], rows: tuple[jax.Array, ...], heads: int):
    """``prefill(*rows, pool=, slot=, tile_sequence=, positions=)`` on arrays [B, L, ...], padded to tiles.

    Returns:
      outputs float32[B, L, heads, 128] and final states float32[B, heads, 128, 128].
    """
    batch, length = rows[0].shape[:2]
    padded = -(-length // TILE) * TILE
    extra = padded - length
    flat = (jnp.pad(x, [(0, 0), (0, extra)] + [(0, 0)] * (x.ndim - 2)) for x in rows)
    index = jnp.arange(padded, dtype=jnp.int32)
    out, pool = prefill(
        *(x.reshape(batch * padded, *x.shape[2:]) for x in flat),
        pool=jnp.zeros((batch + 1, heads, 128, 128), jnp.float32),
        slot=jnp.arange(1, batch + 1, dtype=jnp.int32),
        tile_sequence=jnp.repeat(jnp.arange(batch, dtype=jnp.int32), padded // TILE),
        positions=jnp.tile(jnp.where(index < length, index, -1), batch),
    )
    return out.reshape(batch, padded, heads, -1)[:, :length], pool[1:]


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _gated_delta(q, k, v, g, beta, interpret):
    prefill = functools.partial(delta.prefill, interpret=interpret)
    return _run(prefill, (q, k, v, g, beta), v.shape[2])


def _gated_delta_forward(q, k, v, g, beta, interpret):
    return _gated_delta(q, k, v, g, beta, interpret), (q, k, v, g, beta)


def _gated_delta_backward(interpret, rows, gradients):
    del interpret
    return jax.vjp(functools.partial(delta_op.gated_delta_whole, implementation="xla"), *rows)[1](gradients)


_gated_delta.defvjp(_gated_delta_forward, _gated_delta_backward)


def gated_delta(
    q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array, *, interpret: Any = None
) -> tuple[jax.Array, jax.Array]:
    """As ops.gated_delta_whole for 16-bit q, k, v of heads of 128; differentiable."""
    return _gated_delta(q, k, v, g, beta, interpret)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _simple_gla(q, k, v, slopes, scale, interpret):
    def prefill(q, k, v, **rest):
        return simple.prefill(q, k, v, slopes, scale=scale, interpret=interpret, **rest)

    return _run(prefill, (q, k, v), v.shape[2])


def _simple_gla_forward(q, k, v, slopes, scale, interpret):
    return _simple_gla(q, k, v, slopes, scale, interpret), (q, k, v, slopes)


def _simple_gla_backward(scale, interpret, operands, gradients):
    del interpret
    function = functools.partial(simple_op.simple_gla_whole, scale=scale, implementation="xla")
    return jax.vjp(function, *operands)[1](gradients)


_simple_gla.defvjp(_simple_gla_forward, _simple_gla_backward)


def simple_gla(
    q: jax.Array, k: jax.Array, v: jax.Array, slopes: jax.Array, *, scale: float, interpret: Any = None
) -> tuple[jax.Array, jax.Array]:
    """As ops.simple_gla_whole for 16-bit q, k, v of heads of 128; differentiable."""
    return _simple_gla(q, k, v, slopes, scale, interpret)
