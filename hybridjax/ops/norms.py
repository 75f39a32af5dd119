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
gated = Op("gated", _gated)
swiglu = Op("swiglu", _swiglu)
