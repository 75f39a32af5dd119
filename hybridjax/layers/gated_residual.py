"""Gated Residual: several residual streams, mixed into a sublayer's input and fed by its output."""

import jax
import jax.numpy as jnp
from flax import nnx

from hybridjax.layers.linear import Initializer, Linear
from hybridjax.layers.norm import CenteredRMSNorm

_FLOAT32 = jnp.dtype(jnp.float32)


class GatedResidual(nnx.Module):
    """C residual streams of size H, side by side in one axis (qwen4_exp 7).

    The norm of the streams is the only norm before a sublayer; there is none on its input.

    Args:
      hidden: H.
      streams: C.
      rank: width of the bottleneck between the streams and their mixing gates.
      inject: whether a sublayer's output comes back through ``combine``; the final mix has none.
    """

    def __init__(
        self,
        hidden: int,
        streams: int,
        rank: int,
        *,
        eps: float,
        init: Initializer,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
        inject: bool = True,
    ):
        width = streams * hidden
        self.streams = streams
        self.hc_norm = CenteredRMSNorm(width, eps=eps, dtype=dtype, groups=streams)
        self.down = Linear(width, rank, init=init, dtype=dtype, rngs=rngs, axes=("rank", "streams"))
        self.up = Linear(rank, width, init=init, dtype=dtype, rngs=rngs, axes=("streams", "rank"))
        if inject:
            self.inject = Linear(width, streams, init=init, dtype=dtype, rngs=rngs, axes=("gates", "streams"))

    def mix(self, residual: jax.Array) -> tuple[jax.Array, jax.Array]:
        """residual [N, C * H] -> the sublayer's input [N, H] and the normed streams [N, C * H]."""
        normed = self.hc_norm(residual)
        low = jax.nn.silu(self.down(normed, _FLOAT32) / self.streams).astype(residual.dtype)
        gates = jax.nn.sigmoid(self.up(low, _FLOAT32))
        mixed = (gates * normed).reshape(normed.shape[0], self.streams, -1).mean(axis=1)
        return mixed.astype(residual.dtype), normed

    def combine(self, residual: jax.Array, normed: jax.Array, y: jax.Array) -> jax.Array:
        """Adds a sublayer's output y [N, H] to every stream, each with its own gate from ``normed``."""
        gates = 2.0 * jax.nn.sigmoid(self.inject(normed, _FLOAT32) / self.streams)
        rows = residual.shape[0]
        streams = residual.reshape(rows, self.streams, -1)
        out = streams + gates[:, :, None] * y[:, None, :]
        return out.astype(residual.dtype).reshape(rows, -1)
