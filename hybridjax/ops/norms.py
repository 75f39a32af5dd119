"""RMS normalisation and the pointwise ops around it."""

import jax
import jax.numpy as jnp

from hybridjax.ops.dispatch import Op


def _rms_norm(x: jax.Array, weight: jax.Array, *, eps: float) -> jax.Array:
    """RMSNorm over the last axis.

    Statistics in float32; the normalised value is rounded to the dtype of x before it is multiplied
    by the weight, as the released models do (minicpm_sala 1.4).

    Args:
      x: [..., D].
      weight: [D].
      eps: added to the mean square.

    Returns:
      [..., D] in the dtype of x.
    """
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale).astype(x.dtype) * weight.astype(x.dtype)


def _centered_rms_norm(x: jax.Array, weight: jax.Array, *, eps: float, groups: int = 1) -> jax.Array:
    """RMSNorm with weights around zero: x / rms(x) * (1 + weight), rounded once (qwen4_exp 3).

    Args:
      x: [..., D].
      weight: [D].
      eps: added to the mean square.
      groups: the last axis is normalised in this many equal parts.

    Returns:
      [..., D] in the dtype of x.
    """
    wide = x.astype(jnp.float32).reshape(*x.shape[:-1], groups, -1)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return ((wide * scale).reshape(x.shape) * (1.0 + weight.astype(jnp.float32))).astype(x.dtype)


def _gated_rms_norm(
    x: jax.Array, gate: jax.Array, weight: jax.Array, *, eps: float, activation: str
) -> jax.Array:
    """x / rms(x) * weight * activation(gate), in float32 throughout (qwen4_exp 4, step 8).

    Args:
      x, gate: [..., D].
      weight: [D].
      eps: added to the mean square.
      activation: "sigmoid" or "silu".

    Returns:
      [..., D] in the dtype of the gate.
    """
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    act = {"sigmoid": jax.nn.sigmoid, "silu": jax.nn.silu}[activation]
    return (wide * scale * weight.astype(jnp.float32) * act(gate.astype(jnp.float32))).astype(gate.dtype)


def _gated(x: jax.Array, gate: jax.Array) -> jax.Array:
    """x * sigmoid(gate), elementwise, in the dtype of x (minicpm_sala 2.1, 3.1)."""
    return x * jax.nn.sigmoid(gate)


def _swiglu(gate_up: jax.Array) -> jax.Array:
    """silu(gate) * up of a fused projection.

    Args:
      gate_up: [..., 2F]: the gate in the first half, the up projection in the second.

    Returns:
      [..., F].
    """
    gate, up = jnp.split(gate_up, 2, axis=-1)
    return jax.nn.silu(gate) * up


rms_norm = Op("rms_norm", _rms_norm)
centered_rms_norm = Op("centered_rms_norm", _centered_rms_norm)
gated_rms_norm = Op("gated_rms_norm", _gated_rms_norm)
gated = Op("gated", _gated)
swiglu = Op("swiglu", _swiglu)
