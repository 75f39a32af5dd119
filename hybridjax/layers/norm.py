"""RMSNorm as a module."""

import jax
import jax.numpy as jnp
from flax import nnx

from hybridjax.ops import rms_norm


class RMSNorm(nnx.Module):
    """Root-mean-square normalisation over the last axis with a learned scale [size]."""

    def __init__(self, size: int, *, eps: float, dtype: jnp.dtype):
        self.weight = nnx.Param(jnp.ones((size,), dtype))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        return rms_norm(x, self.weight[...], eps=self.eps)
