"""What the pointwise kernels compute with: float32 in registers, rounded where the definitions round."""

import jax
import jax.numpy as jnp


def rounded(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """float32 values as they are in another dtype."""
    return x.astype(dtype).astype(jnp.float32)


def inverse_rms(square_sum: jax.Array, size: int, eps: float) -> jax.Array:
    return jax.lax.rsqrt(square_sum * (1.0 / size) + eps)


def sigmoid(x: jax.Array) -> jax.Array:
    """1 / (1 + exp(-x)), the division as the square of an inverse root: two instructions instead of ten."""
    root = jax.lax.rsqrt(1.0 + jnp.exp(-x))
    return root * root
