"""Rotary position embedding, NeoX style (halves rotated against each other)."""

import jax
import jax.numpy as jnp
import numpy as np

from hybridjax.ops.dispatch import Op


def _rotary(
    x: jax.Array,
    positions: jax.Array,
    *,
    theta: float,
    width: int | None = None,
    sections: tuple[int, ...] | None = None,
) -> jax.Array:
    """Rotates pairs (x[i], x[i + W/2]) of the first W dimensions by position * theta^(-2i/W), in float32.

    Args:
      x: [N, H, D].
      positions: int32[N], absolute; or int32[N, 3], the temporal, vertical and horizontal positions.
      theta: base of the frequencies.
      width: W, the dimensions that are rotated; the rest passes. Default: D.
      sections: with positions [N, 3], how many pairs follow each axis (interleaved MRoPE, qwen4_exp 5):
        pair i follows the vertical axis where i % 3 = 1, the horizontal one where i % 3 = 2, as long as
        their counts last, and the temporal axis elsewhere.

    Returns:
      [N, H, D] in the dtype of x.
    """
    width = x.shape[-1] if width is None else width
    cos, sin = (t[:, None, :] for t in rotary_angles(positions, width // 2, theta, sections))
    turning, rest = x[..., :width], x[..., width:]
    first, second = jnp.split(turning.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return jnp.concatenate([turned.astype(x.dtype), rest], axis=-1)


def rotary_angles(
    positions: jax.Array, pairs: int, theta: float, sections: tuple[int, ...] | None = None
) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines, float32[N, pairs], of what each pair is rotated by; see the op ``rotary``."""
    frequency = theta ** (-jnp.arange(pairs, dtype=jnp.float32) / pairs)
    per_pair = positions.astype(jnp.float32)
    if positions.ndim == 1:
        per_pair = per_pair[:, None]
    else:
        assert sections is not None
        per_pair = per_pair[:, mrope_axes(sections)]
    angle = per_pair * frequency[None, :]
    return jnp.cos(angle), jnp.sin(angle)


def mrope_axes(sections: tuple[int, ...]) -> np.ndarray:
    """int[pairs]: the axis (0 temporal, 1 vertical, 2 horizontal) that each frequency pair follows."""
    pair = np.arange(sum(sections))
    axes = np.zeros_like(pair)
    for axis in (1, 2):
        axes[(pair % 3 == axis) & (pair < 3 * sections[axis])] = axis
    return axes


rotary = Op("rotary", _rotary)
