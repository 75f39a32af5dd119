"""The linear mixer of MiniCPM-SALA: SimpleGLA with QK norm, RoPE, output norm and gate."""

import jax
import jax.numpy as jnp
from flax import nnx

from hybridjax.batch import Batch, Mode, Probe, RecurrentCache
from hybridjax.configs import MiniCPMSALAConfig
from hybridjax.layers.linear import Initializer, Linear
from hybridjax.layers.norm import RMSNorm
from hybridjax.ops import (
    lightning_decode,
    lightning_output,
    lightning_rows,
    simple_gla_prefill,
    simple_gla_whole,
)
from hybridjax.ops.simple_gla import decay_slopes


class LightningAttention(nnx.Module):
    """minicpm_sala 2.1: project, norm q and k per head, rotate, recur, norm over all heads, gate, project.

    The projections q, k, v and (with an output gate) z share one matrix, in this order.
    """

    def __init__(self, config: MiniCPMSALAConfig, *, init: Initializer, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.config = config
        width = config.lightning_nh * config.lightning_head_dim
        sizes = (width,) * (4 if config.use_output_gate else 3)
        self.in_proj = Linear(
            config.hidden_size, sizes, init=init, dtype=dtype, rngs=rngs, axes=("heads", "hidden")
        )
        self.o_proj = Linear(
            width, config.hidden_size, init=init, dtype=dtype, rngs=rngs, axes=("hidden", "heads")
        )
        eps = config.rms_norm_eps
        if config.qk_norm:
            self.q_norm = RMSNorm(config.lightning_head_dim, eps=eps, dtype=dtype)
            self.k_norm = RMSNorm(config.lightning_head_dim, eps=eps, dtype=dtype)
        if config.use_output_norm:
            self.o_norm = RMSNorm(width, eps=eps, dtype=dtype)

    def __call__(
        self, x: jax.Array, batch: Batch, cache: RecurrentCache | None, probe: Probe | None = None
    ) -> tuple[jax.Array, RecurrentCache | None]:
        """x [N, hidden] -> y [N, hidden] and the cache after the step (None in WHOLE mode)."""
        config = self.config
        heads, size, eps = config.lightning_nh, config.lightning_head_dim, config.rms_norm_eps
        projected = self.in_proj(x)
        q_norm, k_norm = (
            (self.q_norm.weight[...], self.k_norm.weight[...]) if config.qk_norm else (None, None)
        )
        o_norm = self.o_norm.weight[...] if config.use_output_norm else None
        theta = config.rope_theta if config.lightning_use_rope else None
        if batch.mode is Mode.DECODE:
            assert cache is not None
            out, pool = lightning_decode(
                projected,
                q_norm,
                k_norm,
                o_norm,
                jnp.asarray(decay_slopes(heads)),
                cache.state,
                batch.slot,
                batch.positions,
                scale=config.lightning_scale_value,
                eps=eps,
                theta=theta,
                gate=config.use_output_gate,
            )
            return self.o_proj(out), RecurrentCache(pool)
        # The kernels have no gradients.
        implementation = "reference" if batch.mode is Mode.WHOLE else None
        q, k, v = lightning_rows(
            projected,
            q_norm,
            k_norm,
            batch.positions,
            heads=heads,
            size=size,
            eps=eps,
            theta=theta,
            implementation=implementation,
        )
        out, cache = self._recur(q, k, v, batch, cache, probe)
        out = lightning_output(
            out, projected, o_norm, eps=eps, gate=config.use_output_gate, implementation=implementation
        )
        return self.o_proj(out), cache

    def _recur(self, q, k, v, batch: Batch, cache: RecurrentCache | None, probe: Probe | None):
        slopes = jnp.asarray(decay_slopes(self.config.lightning_nh))
        scale = self.config.lightning_scale_value
        if batch.mode is Mode.WHOLE:
            sequences, length = batch.slot.shape[0], batch.whole_length
            q, k, v = (t.reshape(sequences, -1, *t.shape[1:])[:, :length] for t in (q, k, v))
            out, state = simple_gla_whole(q, k, v, slopes, scale=scale)
            if probe is not None:
                probe("state", state)
            padding = batch.tokens.shape[0] // sequences - length
            out = jnp.pad(out, ((0, 0), (0, padding), (0, 0), (0, 0)))
            return out.reshape(-1, *out.shape[2:]), None
        assert cache is not None
        if batch.mode is Mode.PREFILL:
            out, pool = simple_gla_prefill(
                q,
                k,
                v,
                slopes,
                cache.state,
                batch.slot,
                batch.tile_sequence,
                batch.positions,
                scale=scale,
                initial_slot=batch.initial_slot,
                snapshot_slot=batch.snapshot_slot,
            )
        else:
            raise NotImplementedError(f"SimpleGLA in mode {batch.mode}")
        return out, RecurrentCache(pool)
