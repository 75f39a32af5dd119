"""The gated feed-forward layer."""

import jax
import jax.numpy as jnp
from flax import nnx

from hybridjax.layers.linear import Initializer, Linear
from hybridjax.ops import swiglu


class SwiGLU(nnx.Module):
    """down(silu(gate(x)) * up(x)); gate and up share one matrix."""

    def __init__(
        self, hidden: int, intermediate: int, *, init: Initializer, dtype: jnp.dtype, rngs: nnx.Rngs
    ):
        self.gate_up = Linear(
            hidden, (intermediate, intermediate), init=init, dtype=dtype, rngs=rngs, axes=("ffn", "hidden")
        )
        self.down = Linear(intermediate, hidden, init=init, dtype=dtype, rngs=rngs, axes=("hidden", "ffn"))

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., hidden] -> [..., hidden]."""
        return self.down(swiglu(self.gate_up(x)))
