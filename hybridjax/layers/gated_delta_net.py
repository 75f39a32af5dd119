"""The linear mixer of Qwen4Exp: Gated DeltaNet with a short convolution and an output gate."""

import jax
import jax.numpy as jnp
from flax import nnx

from hybridjax.batch import Batch, GatedDeltaCache, Mode, Probe
from hybridjax.configs.qwen4_exp import Qwen4ExpConfig
from hybridjax.layers.linear import Initializer, Linear
from hybridjax.ops import (
    gated_delta_inputs,
    gated_delta_net_decode,
    gated_delta_output,
    gated_delta_prefill,
    gated_delta_whole,
)


class GatedDeltaNet(nnx.Module):
    """qwen4_exp 4: project, convolve, recur by the gated delta rule, norm each head, gate, project.

    The projections qkv (all of q, then k, then v), z, b and a share one matrix, in this order. ``A_log`` and
    ``dt_bias`` are float32 whatever the model's dtype.
    """

    def __init__(self, config: Qwen4ExpConfig, *, init: Initializer, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.config = config
        heads = config.linear_num_value_heads
        key_width = config.linear_num_key_heads * config.linear_key_head_dim
        value_width = heads * config.linear_value_head_dim
        channels = 2 * key_width + value_width
        self.in_proj = Linear(
            config.hidden_size,
            (channels, value_width, heads, heads),
            init=init,
            dtype=dtype,
            rngs=rngs,
            axes=("heads", "hidden"),
        )
        self.conv_weight = nnx.Param(init(rngs.params(), (channels, 1, config.linear_conv_kernel_dim), dtype))
        # Away from zero, so that the logarithm is finite.
        rate = jax.random.uniform(rngs.params(), (heads,), jnp.float32, 0.01, 16.0)
        self.A_log = nnx.Param(jnp.log(rate))
        self.dt_bias = nnx.Param(jnp.ones((heads,), jnp.float32))
        self.norm_weight = nnx.Param(jnp.ones((config.linear_value_head_dim,), dtype))
        self.out_proj = Linear(
            value_width, config.hidden_size, init=init, dtype=dtype, rngs=rngs, axes=("hidden", "heads")
        )

    def __call__(
        self, x: jax.Array, batch: Batch, cache: GatedDeltaCache | None, probe: Probe | None = None
    ) -> tuple[jax.Array, GatedDeltaCache | None]:
        """x [N, hidden] -> y [N, hidden] and the cache after the step (None in WHOLE mode)."""
        config = self.config
        projected = self.in_proj(x)
        parameters = self.conv_weight[...], self.A_log[...], self.dt_bias[...]
        if batch.mode is Mode.DECODE:
            assert cache is not None
            out, state, conv = gated_delta_net_decode(
                projected,
                *parameters,
                self.norm_weight[...],
                cache.state,
                cache.conv,
                batch.slot,
                batch.positions,
                key_heads=config.linear_num_key_heads,
                eps=config.rms_norm_eps,
                activation=config.gate_activation,
            )
            return self.out_proj(out), GatedDeltaCache(state, conv)
        rows, conv = gated_delta_inputs(
            projected,
            *parameters,
            batch,
            None if cache is None else cache.conv,
            key_heads=config.linear_num_key_heads,
            key_size=config.linear_key_head_dim,
            value_size=config.linear_value_head_dim,
        )
        out, state = self._recur(rows, batch, cache, probe)
        out = gated_delta_output(
            out,
            projected,
            self.norm_weight[...],
            first=self.conv_weight[...].shape[0],
            eps=config.rms_norm_eps,
            activation=config.gate_activation,
            # The kernel has no gradient.
            implementation="reference" if batch.mode is Mode.WHOLE else None,
        )
        y = self.out_proj(out.reshape(x.shape[0], -1))
        return y, None if state is None or conv is None else GatedDeltaCache(state, conv)

    def _recur(self, rows, batch: Batch, cache: GatedDeltaCache | None, probe: Probe | None):
        """Outputs float32[N, Hv, Dv] and the pool of states (None in WHOLE mode)."""
        if batch.mode is Mode.WHOLE:
            sequences, length = batch.slot.shape[0], batch.whole_length
            rows = (t.reshape(sequences, -1, *t.shape[1:])[:, :length] for t in rows)
            out, state = gated_delta_whole(*rows)
            if probe is not None:
                probe("state", state)
            padding = batch.tokens.shape[0] // sequences - length
            out = jnp.pad(out, ((0, 0), (0, padding), (0, 0), (0, 0)))
            return out.reshape(-1, *out.shape[2:]), None
        assert cache is not None
        if batch.mode is Mode.PREFILL:
            return gated_delta_prefill(
                *rows,
                cache.state,
                batch.slot,
                batch.tile_sequence,
                batch.positions,
                initial_slot=batch.initial_slot,
                snapshot_slot=batch.snapshot_slot,
            )
        raise NotImplementedError(f"Gated DeltaNet in mode {batch.mode}")
