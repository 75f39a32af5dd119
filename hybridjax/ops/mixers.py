"""What the linear mixers do between their two projections, as ops of their own.

Each takes the fused projection as it is: a kernel can then read its columns in place, where a slice of them
would be copied first, and what a mixer does with one token is one op.
"""

import jax
import jax.numpy as jnp

from hybridjax.batch import Batch, Mode
from hybridjax.ops.causal_conv import causal_conv
from hybridjax.ops.dispatch import Op
from hybridjax.ops.gated_delta import gated_delta_decode
from hybridjax.ops.norms import gated, gated_rms_norm, rms_norm
from hybridjax.ops.rotary import rotary
from hybridjax.ops.simple_gla import simple_gla_decode


def _lightning_rows(
    projected: jax.Array,
    q_norm: jax.Array | None,
    k_norm: jax.Array | None,
    positions: jax.Array,
    *,
    heads: int,
    size: int,
    eps: float,
    theta: float | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries and keys, normalised per head and rotated, and values (minicpm_sala 2.1).

    Args:
      projected: [N, >= 3 * H * D]: all of q, then k, then v, then whatever else.
      q_norm, k_norm: [D] weights of the norms; None: no norms.
      positions: int32[N].
      heads, size: H and D.
      eps: added to the mean square.
      theta: base of the rotary frequencies; None: no rotation.

    Returns:
      q, k, v [N, H, D] in the dtype of ``projected``.
    """
    width = heads * size
    q, k, v = (projected[:, i * width : (i + 1) * width].reshape(-1, heads, size) for i in range(3))
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm(q, q_norm, eps=eps), rms_norm(k, k_norm, eps=eps)
    if theta is not None:
        q, k = (rotary(x, positions, theta=theta) for x in (q, k))
    return q, k, v


def _lightning_output(
    out: jax.Array, projected: jax.Array, o_norm: jax.Array | None, *, eps: float, gate: bool
) -> jax.Array:
    """What the recurrence gave, rounded, normalised over all heads and gated (minicpm_sala 2.1).

    Args:
      out: float32[N, H, D].
      projected: [N, >= H * D], the last H * D columns of which gate.
      o_norm: [H * D] weight of the norm; None: no norm.
      eps: added to the mean square.
      gate: whether there is a gate.

    Returns:
      [N, H * D] in the dtype of ``projected``.
    """
    rows = out.astype(projected.dtype).reshape(out.shape[0], -1)
    if o_norm is not None:
        rows = rms_norm(rows, o_norm, eps=eps)
    return gated(rows, projected[:, -rows.shape[1] :]) if gate else rows


def _lightning_decode(
    projected: jax.Array,
    q_norm: jax.Array | None,
    k_norm: jax.Array | None,
    o_norm: jax.Array | None,
    slopes: jax.Array,
    pool: jax.Array,
    slot: jax.Array,
    positions: jax.Array,
    *,
    scale: float,
    eps: float,
    theta: float | None,
    gate: bool,
) -> tuple[jax.Array, jax.Array]:
    """One token of each sequence through SimpleGLA and all around it; see lightning_rows, lightning_output.

    Args:
      projected: [B, 3 or (with a gate) 4 times H * D]: all of q, then k, v and gates.
      slopes, pool, slot, positions, scale: as for simple_gla_decode; pool float32[slots, H, D, D].

    Returns:
      [B, H * D] in the dtype of ``projected`` and the pool.
    """
    heads, size = pool.shape[1:3]
    q, k, v = lightning_rows(
        projected, q_norm, k_norm, positions, heads=heads, size=size, eps=eps, theta=theta
    )
    out, pool = simple_gla_decode(q, k, v, slopes, pool, slot, positions, scale=scale)
    return lightning_output(out, projected, o_norm, eps=eps, gate=gate), pool


def gated_delta_rows(
    projected: jax.Array,
    conv_weight: jax.Array,
    A_log: jax.Array,
    dt_bias: jax.Array,
    batch: Batch,
    pool: jax.Array | None,
    *,
    key_heads: int,
    key_size: int,
    value_size: int,
) -> tuple[tuple[jax.Array, ...], jax.Array, jax.Array | None]:
    """The operands of the gated delta rule, by a short convolution and SiLU, and its gates (qwen4_exp 4).

    Args:
      projected: [N, channels + Hv * Dv + 2 * Hv]: all of q, k, v, then the output's gates z, b and a.
      conv_weight: [channels, 1, K] with channels = 2 * Hk * Dk + Hv * Dv.
      A_log, dt_bias: float32[Hv].
      batch, pool: as for causal_conv.
      key_heads, key_size, value_size: Hk, Dk and Dv.

    Returns:
      (q, k [N, Hk, Dk], v [N, Hv, Dv], g, beta float32[N, Hv]), z [N, Hv, Dv] and the pool.
    """
    rows, heads = projected.shape[0], A_log.shape[0]
    keys, channels = key_heads * key_size, conv_weight.shape[0]
    ends = [channels, channels + heads * value_size, channels + heads * (value_size + 1)]
    qkv, z, b, a = jnp.split(projected, ends, axis=-1)
    mixed, pool = causal_conv(qkv, conv_weight, batch, pool)
    mixed = jax.nn.silu(mixed).astype(projected.dtype)
    q, k, v = jnp.split(mixed, [keys, 2 * keys], axis=-1)
    q, k = (x.reshape(rows, key_heads, key_size) for x in (q, k))
    v, z = (x.reshape(rows, heads, value_size) for x in (v, z))
    g = -jnp.exp(A_log) * jax.nn.softplus(a.astype(jnp.float32) + dt_bias)
    return (q, k, v, g, jax.nn.sigmoid(b.astype(jnp.float32))), z, pool


def _gated_delta_net_decode(
    projected: jax.Array,
    conv_weight: jax.Array,
    A_log: jax.Array,
    dt_bias: jax.Array,
    norm: jax.Array,
    state: jax.Array,
    conv: jax.Array,
    slot: jax.Array,
    positions: jax.Array,
    *,
    key_heads: int,
    eps: float,
    activation: str,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One token of each sequence through a Gated DeltaNet between its projections (qwen4_exp 4, 2 to 8).

    Args:
      projected, conv_weight, A_log, dt_bias, key_heads: see gated_delta_rows.
      norm: [Dv], eps, activation: as for gated_rms_norm, which is applied per value head.
      state: float32[slots, Hv, Dk, Dv]; conv: [slots, K - 1, channels], the last inputs of the convolution.
      slot, positions: int32[B]; rows with position -1 are padding, slot 0 is scratch.

    Returns:
      [B, Hv * Dv] in the dtype of ``projected``, the states and the convolution's inputs after the step.
    """
    empty = jnp.zeros((0,), jnp.int32)
    batch = Batch(
        tokens=positions,
        positions=positions,
        tile_sequence=empty,
        context_length=positions + 1,
        slot=slot,
        page_table=empty[None],
        logit_rows=empty,
        mode=Mode.DECODE,
    )
    rows, z, kept = gated_delta_rows(
        projected,
        conv_weight,
        A_log,
        dt_bias,
        batch,
        conv,
        key_heads=key_heads,
        key_size=state.shape[2],
        value_size=state.shape[3],
    )
    assert kept is not None
    out, state = gated_delta_decode(*rows, state, slot, positions)
    out = gated_rms_norm(out, z, norm, eps=eps, activation=activation)
    return out.reshape(projected.shape[0], -1), state, kept


lightning_rows = Op("lightning_rows", _lightning_rows)
lightning_output = Op("lightning_output", _lightning_output)
lightning_decode = Op("lightning_decode", _lightning_decode)
gated_delta_net_decode = Op("gated_delta_net_decode", _gated_delta_net_decode)
