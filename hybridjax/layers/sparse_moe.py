"""The feed-forward layer of Qwen4Exp: routed experts and one that every token uses."""

import jax
import jax.numpy as jnp
from flax import nnx

from hybridjax.batch import Batch, Probe
from hybridjax.configs import Qwen4ExpConfig
from hybridjax.layers.linear import Initializer, Linear
from hybridjax.layers.mlp import SwiGLU
from hybridjax.ops import experts, route

_FLOAT32 = jnp.dtype(jnp.float32)


class DenseExperts(nnx.Module):
    """Plain expert matrices, laid out as in checkpoints; it alone knows how they are stored and applied.

    Args:
      count: E; hidden: H; intermediate: I. ``gate_up`` is [E, 2I, H], gate rows before up rows, ``down``
        [E, H, I].
    """

    axes = {"gate_up": ("experts", "ffn", "hidden"), "down": ("experts", "hidden", "ffn")}

    def __init__(
        self,
        count: int,
        hidden: int,
        intermediate: int,
        *,
        init: Initializer,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        self.gate_up = nnx.Param(init(rngs.params(), (count, 2 * intermediate, hidden), dtype))
        self.down = nnx.Param(init(rngs.params(), (count, hidden, intermediate), dtype))

    def apply(self, x: jax.Array, ids: jax.Array, weights: jax.Array) -> jax.Array:
        """x [N, H], ids int32[N, k] (-1: none), weights float32[N, k] -> the weighted sum [N, H]."""
        return experts(x, ids, weights, self.gate_up[...], self.down[...])


class SparseMoE(nnx.Module):
    """qwen4_exp 9: the k most probable of E experts, plus a shared one behind a sigmoid gate.

    Router and shared gate are kept out of quantisation. The experts' weights stay float32 and the two parts
    are added in float32, where transformers rounds both to the model dtype.
    """

    def __init__(self, config: Qwen4ExpConfig, *, init: Initializer, dtype: jnp.dtype, rngs: nnx.Rngs):
        hidden = config.hidden_size
        self.k, self.normalise = config.num_experts_per_tok, config.norm_topk_prob
        self.gate = Linear(
            hidden, config.num_experts, init=init, dtype=dtype, rngs=rngs, axes=("router", "hidden")
        )
        self.experts = DenseExperts(
            config.num_experts, hidden, config.moe_intermediate_size, init=init, dtype=dtype, rngs=rngs
        )
        self.shared = SwiGLU(
            hidden, config.shared_expert_intermediate_size, init=init, dtype=dtype, rngs=rngs
        )
        self.shared_gate = Linear(hidden, 1, init=init, dtype=dtype, rngs=rngs, axes=("gates", "hidden"))

    def __call__(self, x: jax.Array, batch: Batch | None = None, probe: Probe | None = None) -> jax.Array:
        """x [N, hidden] -> y [N, hidden]; rows of ``batch`` with position -1 go to no routed expert.

        Probes: "router_probs" float32[N, E], the softmax over all experts, and "expert_ids" int32[N, k],
        -1 for padding.
        """
        logits = self.gate(x, _FLOAT32)
        ids, weights = route(logits, self.k, self.normalise)
        if batch is not None:
            ids = jnp.where(batch.positions[:, None] < 0, -1, ids)
        if probe is not None:
            probe("router_probs", jax.nn.softmax(logits, axis=-1))
            probe("expert_ids", ids)
        routed = self.experts.apply(x, ids, weights).astype(jnp.float32)
        shared = jax.nn.sigmoid(self.shared_gate(x, _FLOAT32)) * self.shared(x).astype(jnp.float32)
        return (routed + shared).astype(x.dtype)
