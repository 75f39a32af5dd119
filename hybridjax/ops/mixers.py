"""What the linear mixers do between their two projections, as ops of their own.

Each takes the fused projection as it is: a kernel can then read its columns in place, where a slice of them
would be copied first, and what a mixer does with one token is one op.
"""

import jax
import jax.numpy as jnp

from hybridjax.batch import TILE, Batch, Mode
from hybridjax.ops.causal_conv import causal_conv
from hybridjax.ops.dispatch import Op, architecture
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


def _gated_delta_inputs(
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
) -> tuple[tuple[jax.Array, ...], jax.Array | None]:
    """The operands of the gated delta rule, by a short convolution and SiLU, and its gates (qwen4_exp 4).

    Queries and keys are not normalised: the recurrence does it.

    Args:
      projected: [N, channels + Hv * Dv + 2 * Hv]: all of q, k, v, then the output's gates z, b and a.
      conv_weight: [channels, 1, K] with channels = 2 * Hk * Dk + Hv * Dv.
      A_log, dt_bias: float32[Hv].
      batch, pool: as for causal_conv.
      key_heads, key_size, value_size: Hk, Dk and Dv.

    Returns:
      (q, k [N, Hk, Dk], v [N, Hv, Dv], g, beta float32[N, Hv]) and the pool.
    """
    rows, heads = projected.shape[0], A_log.shape[0]
    keys, channels = key_heads * key_size, conv_weight.shape[0]
    mixed, pool = causal_conv(projected[:, :channels], conv_weight, batch, pool)
    mixed = jax.nn.silu(mixed).astype(projected.dtype)
    q, k, v = jnp.split(mixed, [keys, 2 * keys], axis=-1)
    q, k = (x.reshape(rows, key_heads, key_size) for x in (q, k))
    v = v.reshape(rows, heads, value_size)
    g, beta = gates(projected, A_log, dt_bias, together=batch.mode is Mode.DECODE)
    return (q, k, v, g, beta), pool


def gates(
    projected: jax.Array, A_log: jax.Array, dt_bias: jax.Array, *, together: bool = False
) -> tuple[jax.Array, jax.Array]:
    """g and beta float32[N, Hv] of gated_delta_inputs.

    ``together``: as halves of an array, of which XLA makes one kernel, not two. That counts in a decode step;
    kernels of prompts want each by itself, transposed.
    """
    rows, heads = projected.shape[0], A_log.shape[0]
    columns = projected[:, -2 * heads :].astype(jnp.float32)
    if not together:
        beta, step = jnp.split(columns, 2, axis=1)
        return -jnp.exp(A_log) * jax.nn.softplus(step + dt_bias), jax.nn.sigmoid(beta)
    both = jnp.swapaxes(columns.reshape(rows, 2, heads), 0, 1)
    first = jax.lax.broadcasted_iota(jnp.int32, (2, 1, 1), 0) == 0
    decays = -jnp.exp(A_log) * jax.nn.softplus(both + dt_bias)
    beta, g = jnp.where(first, jax.nn.sigmoid(both), decays)
    return g, beta


def _gated_delta_output(
    out: jax.Array, projected: jax.Array, norm: jax.Array, *, first: int, eps: float, activation: str
) -> jax.Array:
    """gated_rms_norm per head, gated by columns of the fused projection (qwen4_exp 4, step 8).

    Args:
      out: float32[N, H, D].
      projected: [N, >= first + H * D] with the gates from column ``first`` on.
      norm: [D]; eps, activation: see gated_rms_norm.

    Returns:
      [N, H, D] in the dtype of ``projected``.
    """
    _, heads, size = out.shape
    gates = projected[:, first : first + heads * size].reshape(out.shape)
    return gated_rms_norm(out, gates, norm, eps=eps, activation=activation)


def _gated_delta_net_decode(
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
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One token of each sequence through a Gated DeltaNet between its projections (qwen4_exp 4, 2 to 8).

    Args:
      projected, conv_weight, A_log, dt_bias, key_heads: see gated_delta_inputs.
      norm: [Dv], eps, activation: as for gated_rms_norm, which is applied per value head.
      pool: float32[slots, Hv, Dk, Dv], the states.
      conv: [slots, K - 1, channels], the last inputs of the convolution.
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
    rows, kept = _gated_delta_inputs(
        projected,
        conv_weight,
        A_log,
        dt_bias,
        batch,
        conv,
        key_heads=key_heads,
        key_size=pool.shape[2],
        value_size=pool.shape[3],
    )
    assert kept is not None
    out, pool = gated_delta_decode(*rows, pool, slot, positions)
    channels = conv_weight.shape[0]
    out = gated_delta_output(out, projected, norm, first=channels, eps=eps, activation=activation)
    return out.reshape(projected.shape[0], -1), pool, kept


def _lightning_decode_together(
    projected, q_norm, k_norm, o_norm, slopes, pool, slot, positions, *, scale, eps, theta, gate
):
    """Queries and keys in one array, of which XLA makes one kernel each where it makes two of two arrays."""
    if q_norm is None or k_norm is None or theta is None:
        arguments = projected, q_norm, k_norm, o_norm, slopes, pool, slot, positions
        return _lightning_decode(*arguments, scale=scale, eps=eps, theta=theta, gate=gate)
    rows, (heads, size) = projected.shape[0], pool.shape[1:3]
    width = heads * size
    # Queries before all keys: each of the two is then read in place, not copied out first.
    both = jnp.swapaxes(projected[:, : 2 * width].reshape(rows, 2, heads, size), 0, 1)
    queries = jax.lax.broadcasted_iota(jnp.int32, (2, 1, 1, size), 0) == 0
    both = rms_norm(both, jnp.where(queries, q_norm, k_norm), eps=eps).reshape(2 * rows, heads, size)
    both = rotary(both, jnp.tile(positions, 2), theta=theta)
    v = projected[:, 2 * width : 3 * width].reshape(rows, heads, size)
    out, pool = simple_gla_decode(both[:rows], both[rows:], v, slopes, pool, slot, positions, scale=scale)
    return lightning_output(out, projected, o_norm, eps=eps, gate=gate), pool


def _heads_of_128(pool: jax.Array) -> bool:
    """What the GPU kernels hold: float32 states of 128 x 128. They were verified on Hopper only."""
    return architecture() == "sm_90" and pool.shape[-2:] == (128, 128) and pool.dtype == jnp.float32


def _prompt(projected: jax.Array) -> bool:
    rows, columns = projected.shape
    narrow = projected.dtype in (jnp.bfloat16, jnp.float16)
    return architecture() == "sm_90" and narrow and rows > 0 and rows % TILE == 0 and columns % 16 == 0


def _rows_kernel_fits(projected, q_norm, k_norm, positions, *, heads, size, eps, theta) -> bool:
    all_parts = q_norm is not None and k_norm is not None and theta is not None
    return _prompt(projected) and all_parts and size == 128 and projected.shape[1] % 128 == 0 == heads % 4


def _output_kernel_fits(out, projected, o_norm, *, eps, gate) -> bool:
    heads, size = out.shape[1:]
    fits = size == 128 and projected.shape[1] % 128 == 0 == heads % 2 and heads <= 64
    return _prompt(projected) and fits and o_norm is not None and gate and out.dtype == jnp.float32


def _inputs_kernel_fits(
    projected, conv_weight, A_log, dt_bias, batch, pool, *, key_heads, key_size, value_size
) -> bool:
    if batch.mode is not Mode.PREFILL or pool is None or not _prompt(projected):
        return False
    even = key_heads % 2 == 0 == A_log.shape[0] % 2
    taps = conv_weight.shape[-1] == 4 and pool.shape[1] == 3
    return even and taps and key_size == value_size == 128 and projected.dtype == pool.dtype


def _delta_output_kernel_fits(out, projected, norm, *, first, eps, activation) -> bool:
    # The copy engine swizzles lines of up to 64 columns, where the row is a multiple of one.
    line = next((n for n in (64, 32, 16) if projected.shape[1] % n == 0), 1)
    return _prompt(projected) and out.shape[2] == 128 and first % line == 0 and out.dtype == jnp.float32


def _lightning_kernel_fits(
    projected, q_norm, k_norm, o_norm, slopes, pool, *rest, theta, gate, **options
) -> bool:
    all_parts = gate and theta is not None and all(x is not None for x in (q_norm, k_norm, o_norm))
    even = pool.shape[1] % 2 == 0
    return _heads_of_128(pool) and all_parts and even and projected.dtype in (jnp.bfloat16, jnp.float16)


def _gated_delta_net_kernel_fits(
    projected, conv_weight, A_log, dt_bias, norm, pool, conv, *rest, **options
) -> bool:
    narrow = projected.dtype == conv.dtype and projected.dtype in (jnp.bfloat16, jnp.float16)
    return _heads_of_128(pool) and narrow and conv_weight.shape[-1] == 4 and conv_weight.shape[0] % 128 == 0


_KERNELS = "hybridjax.pallas_kernels.pointwise."
lightning_rows = Op("lightning_rows", _lightning_rows)
lightning_output = Op("lightning_output", _lightning_output)
gated_delta_inputs = Op("gated_delta_inputs", _gated_delta_inputs)
lightning_decode = Op("lightning_decode", _lightning_decode)
gated_delta_output = Op("gated_delta_output", _gated_delta_output)
gated_delta_net_decode = Op("gated_delta_net_decode", _gated_delta_net_decode)

for _op, _target, _supports in (
    (lightning_rows, "prompt:lightning_rows", _rows_kernel_fits),
    (lightning_output, "prompt:lightning_output", _output_kernel_fits),
    (gated_delta_inputs, "inputs:gated_delta_inputs", _inputs_kernel_fits),
    (lightning_decode, "lightning:decode", _lightning_kernel_fits),
    (gated_delta_output, "prompt:gated_delta_output", _delta_output_kernel_fits),
    (gated_delta_net_decode, "gated_delta_net:decode", _gated_delta_net_kernel_fits),
):
    _op.register("mosaic_gpu", _KERNELS + _target, platforms=("gpu",), supports=_supports)
lightning_decode.register("xla", _lightning_decode_together, platforms=("gpu",))
