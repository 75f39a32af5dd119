"""One token of each sequence through SimpleGLA and all around it in two kernels; see ops.lightning_decode.

The first normalises and rotates q and k while the copy engine brings the state, and updates it; the second
normalises over all heads and gates.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from hybridjax.ops.rotary import rotary_angles
from hybridjax.pallas_kernels import state_update
from hybridjax.pallas_kernels.pointwise.values import inverse_rms, rounded, sigmoid
from hybridjax.pallas_kernels.simple_gla.decode import advance
from hybridjax.pallas_kernels.state_update import SIZE, Tuning, load_value, multiprocessors

_HALF = SIZE // 2
_HALF_ROWS = state_update.ROWS


def _load_half(ref) -> jax.Array:
    """float32[64] from global memory, one element per row of half a state."""
    return plgpu.load(ref, layout=_HALF_ROWS, optimized=False).astype(jnp.float32)


@functools.partial(jax.jit, static_argnames=("scale", "eps", "theta", "gate", "tuning", "interpret"))
def decode(
    projected: jax.Array,
    q_norm: jax.Array,
    k_norm: jax.Array,
    o_norm: jax.Array,
    slopes: jax.Array,
    pool: jax.Array,
    slot: jax.Array,
    positions: jax.Array,
    *,
    scale: float,
    eps: float,
    theta: float,
    gate: bool,
    tuning: Tuning | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """As ops.lightning_decode with norms, rotation and gate, heads of 128 and a float32 pool.

    Rows with position -1 touch no slot; what they give means nothing. Live rows must have distinct slots.
    """
    assert gate
    heads, dtype = pool.shape[1], projected.dtype
    cores = multiprocessors()
    chosen = state_update.choose("simple_gla_decode", slot.shape[0], heads, cores, tuning)
    columns = chosen.columns
    cos, sin = rotary_angles(positions, _HALF, theta)

    def load(refs, row, head, own):
        projected_ref, q_norm_ref, k_norm_ref, cos_ref, sin_ref, slopes_ref = refs

        def halves(ref, start):
            return [_load_half(ref.at[pl.ds(start + at, _HALF)]) for at in (0, _HALF)]

        # All of it first: a sum over a head makes the threads wait for each other.
        mine, start = projected_ref.at[row], head * SIZE
        q, k = halves(mine, start), halves(mine, heads * SIZE + start)
        value = load_value(mine.at[pl.ds(2 * heads * SIZE + start + own.start, columns)])
        q_weight, k_weight = halves(q_norm_ref, 0), halves(k_norm_ref, 0)
        cos, sin = _load_half(cos_ref.at[row]), _load_half(sin_ref.at[row])
        decay = jnp.exp(-slopes_ref[head])

        def normed(x, weight):
            by = inverse_rms(jnp.sum(x[0] * x[0] + x[1] * x[1]), SIZE, eps)
            low, high = (rounded(rounded(part * by, dtype) * w, dtype) for part, w in zip(x, weight))
            turned = low * cos - high * sin, high * cos + low * sin
            return jnp.concatenate([rounded(part, dtype) for part in turned])

        return normed(q, q_weight), normed(k, k_weight), value, decay

    out, pool = state_update.update(
        "lightning_decode",
        load,
        functools.partial(advance, scale=scale),
        (projected, q_norm, k_norm, cos, sin, slopes),
        pool,
        slot,
        positions,
        tuning=chosen,
        multiprocessors=cores,
        interpret=interpret,
    )
    return _output(out, projected, o_norm, eps=eps, interpret=interpret), pool


def _output(out, projected, o_norm, *, eps, interpret):
    """A program per row."""
    rows, width, dtype = out.shape[0], o_norm.shape[0], projected.dtype
    first = projected.shape[1] - width

    def kernel(out_ref, projected_ref, norm_ref, result_ref):
        row = jax.lax.axis_index("row")
        layout = plgpu.Layout.WG_STRIDED((width,), vec_size=2)

        def read(ref):
            return plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)

        gates, weight = read(projected_ref.at[row, pl.ds(first, width)]), read(norm_ref)
        x = rounded(read(out_ref.at[row]), dtype)
        x = rounded(rounded(x * inverse_rms(jnp.sum(x * x), width, eps), dtype) * weight, dtype)
        result_ref[row] = (x * rounded(sigmoid(gates), dtype)).astype(dtype)

    kernel.__name__ = "lightning_output"
    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((rows, width), dtype),
        grid=(rows,),
        grid_names=("row",),
        interpret=interpret,
    )(out.reshape(rows, width), projected, o_norm)
