"""One token of each sequence through Gated DeltaNet between its projections; ops.gated_delta_net_decode.

Three kernels: convolution, SiLU and L2 norm, which also shifts the inputs that the convolution keeps; the
gates and the state; norm and gate of what comes out.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from hybridjax.pallas_kernels import state_update
from hybridjax.pallas_kernels.pointwise.values import inverse_rms, rounded, sigmoid
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
TAPS = 4

# A channel per thread, and with it its four taps, which are neighbours in memory.
_CHANNELS = plgpu.Layout.TILED(plgpu.Tiling(((128,), (32,), (1,))), (-3,), (-2,), -1)
_TAPS = plgpu.Layout.TILED(plgpu.Tiling(((128, 4), (32, 4))), (-4,), (-2,), -1)


@functools.partial(jax.jit, static_argnames=("key_heads", "eps", "activation", "tuning", "interpret"))
def decode(
    projected: jax.Array,
    conv_weight: jax.Array,
    A_log: jax.Array,
    dt_bias: jax.Array,
    norm: jax.Array,
    pool: jax.Array,
    conv: jax.Array,
    slot: jax.Array,
    positions: jax.Array,
    *,
    key_heads: int,
    eps: float,
    activation: str,
    tuning: Tuning | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As ops.gated_delta_net_decode for heads of 128, four taps, float32 states, inputs in the rows' dtype.

    Rows with position -1 touch no slot; what they give means nothing. Live rows must have distinct slots.
    """
    heads, channels = pool.shape[1], conv_weight.shape[0]
    share = heads // key_heads  # value heads per key head
    cores = multiprocessors()
    chosen = state_update.choose("gated_delta_decode", slot.shape[0], heads, cores, tuning)
    columns = chosen.columns
    gates = channels + heads * SIZE  # the column of the first beta; the steps' follow
    mixed, conv = _convolve(projected, conv_weight, conv, slot, positions, key_heads, interpret)

    def load(refs, row, head, own):
        mixed_ref, projected_ref, rate_ref, bias_ref = refs
        key = jax.lax.div(head, jnp.int32(share))
        q, k = (load_key(mixed_ref.at[row, first + key]) for first in (0, key_heads))
        v = load_value(mixed_ref.at[row, 2 * key_heads + head, own])
        beta, step = (projected_ref[row, gates + first + head].astype(jnp.float32) for first in (0, heads))
        return q, k, v, beta, step, bias_ref[head], rate_ref[head]

    def prepare(loaded):
        q, k, v, beta, step, bias, rate = loaded
        step = step + bias
        softplus = jnp.maximum(step, 0.0) + jnp.log(1.0 + jnp.exp(-jnp.abs(step)))
        return q, k, jnp.sum(q * k), v, jnp.exp(-jnp.exp(rate) * softplus), sigmoid(beta)

    def advance(loaded, state):
        q, k, alike, v, decay, beta = loaded
        # Both reads of the decayed state in one pass: q^T (S + k d^T) = q^T S + (q^T k) d^T.
        known, seen = (decay * jnp.sum(by_row(x, columns) * state, axis=0) for x in (k, q))
        delta = beta * (v - known)
        state = decay * state + by_row(k, columns) * by_column(delta, columns)
        return seen + alike * delta, state

    out, pool = state_update.update(
        "gated_delta_net_decode",
        load,
        advance,
        (mixed, projected, A_log, dt_bias),
        pool,
        slot,
        positions,
        tuning=chosen,
        multiprocessors=cores,
        prepare=prepare,
        interpret=interpret,
    )
    y = _output(out, projected, norm, channels, eps, activation, interpret)
    return y.reshape(out.shape[0], -1), pool, conv


def _convolve(projected, conv_weight, conv, slot, positions, key_heads, interpret):
    """float32[B, channels / 128, 128]: queries (scaled), keys and values; and the inputs kept for later.

    A program per row and 128 channels: a head of queries, keys or values.
    """
    rows, pieces, dtype = slot.shape[0], conv_weight.shape[0] // SIZE, projected.dtype

    def kernel(slot_ref, positions_ref, projected_ref, weight_ref, conv_ref, mixed_ref):
        row, piece = jax.lax.axis_index("row"), jax.lax.axis_index("piece")
        here, position, own = pl.ds(piece * SIZE, SIZE), positions_ref[row], slot_ref[row]

        def read(ref, layout):
            return plgpu.load(ref, layout=layout, optimized=False)

        @pl.when(position < 0)
        def _():
            mixed_ref[row, piece] = plgpu.layout_cast(jnp.zeros((SIZE,), jnp.float32), _CHANNELS)

        @pl.when(position >= 0)
        def _():
            weights = read(weight_ref.at[here, 0], _TAPS).astype(jnp.float32)
            tap = plgpu.broadcasted_iota(jnp.int32, weights.shape, 1, layout=_TAPS)
            newest = read(projected_ref.at[row, here], _CHANNELS)
            inputs = [read(conv_ref.at[own, j, here], _CHANNELS) for j in range(TAPS - 1)]
            # A select: what a slot holds of tokens before the first, also NaN, must not show.
            inputs = [
                jnp.where(
                    jax.lax.broadcast_in_dim(position, x.shape, ()) >= TAPS - 1 - j, x, jnp.zeros((), dtype)
                )
                for j, x in enumerate(inputs)
            ]
            inputs.append(newest)
            x = jnp.zeros((SIZE,), jnp.float32)
            for j, value in enumerate(inputs):
                x = x + value.astype(jnp.float32) * jnp.sum(jnp.where(tap == j, weights, 0.0), axis=1)
                if j > 0:
                    conv_ref[own, j - 1, here] = value
            x = rounded(x * sigmoid(x), dtype)
            by = jax.lax.rsqrt(jnp.sum(x * x) + _NORM_EPS)
            by = jnp.where(piece < key_heads, by * SIZE**-0.5, jnp.where(piece < 2 * key_heads, by, 1.0))
            mixed_ref[row, piece] = x * by

    kernel.__name__ = "gated_delta_net_convolve"
    conv_ref = jax.new_ref(conv)
    mixed = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((rows, pieces, SIZE), jnp.float32),
        grid=(rows, pieces),
        grid_names=("row", "piece"),
        interpret=interpret,
    )(slot, positions, projected, conv_weight, conv_ref)
    return mixed, jax.freeze(conv_ref)


def _output(out, projected, norm, channels, eps, activation, interpret):
    """A program per row and head."""
    rows, heads, _ = out.shape
    dtype = projected.dtype

    def kernel(out_ref, projected_ref, norm_ref, result_ref):
        row, head = jax.lax.axis_index("row"), jax.lax.axis_index("head")
        sources = (
            out_ref.at[row, head],
            projected_ref.at[row, pl.ds(channels + head * SIZE, SIZE)],
            norm_ref,
        )
        x, gate, weight = (
            plgpu.load(ref, layout=_CHANNELS, optimized=False).astype(jnp.float32) for ref in sources
        )
        act = sigmoid(gate) if activation == "sigmoid" else gate * sigmoid(gate)
        y = x * inverse_rms(jnp.sum(x * x), SIZE, eps) * weight * act
        result_ref[row, head] = y.astype(dtype)

    kernel.__name__ = "gated_delta_net_output"
    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(out.shape, dtype),
        grid=(rows, heads),
        grid_names=("row", "head"),
        interpret=interpret,
    )(out, projected, norm)
