"""Rotary position embedding, NeoX style (halves rotated against each other)."""

import jax
import jax.numpy as jnp

from hybridjax.ops.dispatch import Op


def _rotary(x: jax.Array, positions: jax.Array, *, theta: float) -> jax.Array:
    """Rotates pairs (x[i], x[i + D/2]) by positions * theta^(-2i/D), in float32.

    Args:
      x: [N, H, D].
      positions: int32[N], absolute.
      theta: base of the frequencies.

    Returns:
      [N, H, D] in the dtype of x.
    """
    half = x.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions.astype(jnp.float32)[:, None] * frequency[None, :]
    cos, sin = jnp.cos(angle)[:, None, :], jnp.sin(angle)[:, None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


rotary = Op("rotary", _rotary)
