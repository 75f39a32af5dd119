"""RMSNorm as a module."""

import jax
import jax.numpy as jnp
from flax import nnx

from hybridjax.ops import centered_rms_norm, rms_norm


class RMSNorm(nnx.Module):
    """Root-mean-square normalisation over the last axis with a learned scale [size]."""

    def __init__(self, size: int, *, eps: float, dtype: jnp.dtype):
        self.weight = nnx.Param(jnp.ones((size,), dtype))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        return rms_norm(x, self.weight[...], eps=self.eps)


class CenteredRMSNorm(nnx.Module):
    """RMSNorm whose learned scale is 1 + weight; ``groups`` equal parts are normalised apart."""

    def __init__(self, size: int, *, eps: float, dtype: jnp.dtype, groups: int = 1):
        self.weight = nnx.Param(jnp.zeros((size,), dtype))
        self.eps = eps
        self.groups = groups

    def __call__(self, x: jax.Array) -> jax.Array:
        return centered_rms_norm(x, self.weight[...], eps=self.eps, groups=self.groups)
