"""Routed experts with NVFP4 weights and activations: ``ops.nvfp4_experts``, activations rounded before both
products.

Emulated: no library multiplies grouped block-scaled matrices yet. Sources: minicpm_sala 4.1, qwen4_exp 9.
"""

import jax
import jax.numpy as jnp

from hybridjax.ops.dispatch import Op, einsum_f32
from hybridjax.ops.experts import activate, block_size, combine, lay_out
from hybridjax.quantization import NVFP4, decode, pack, quantize_activations


def _rounded(x: jax.Array, scale: jax.Array) -> jax.Array:
    """The values of activations [..., K] in NVFP4 before ``scale``, exact in float32."""
    codes, blocks = quantize_activations(x, scale)
    return decode(pack(codes), blocks)


def _one(x: jax.Array, gate_up: NVFP4, down: NVFP4, scales: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rows [n, H] through one expert: float32[n, H]."""
    wide = einsum_f32("nh,oh->no", _rounded(x, scales[0]), decode(gate_up.codes, gate_up.scales))
    hidden = activate(wide * (scales[0] * gate_up.global_scale), x.dtype)
    narrow = einsum_f32("ni,hi->nh", _rounded(hidden, scales[1]), decode(down.codes, down.scales))
    return narrow * (scales[1] * down.global_scale)


def _experts(
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    gate_up: NVFP4,
    down: NVFP4,
    gate_up_input: jax.Array,
    down_input: jax.Array,
) -> jax.Array:
    """The weighted sum of each row's experts.

    Args:
      x, ids, weights, gate_up, down: as for ``nvfp4_experts``.
      gate_up_input, down_input: float32[], the calibrated largest input of each product / 2688.

    Returns:
      [N, H] in the dtype of x.
    """

    def row(item):
        x, ids, weights = item

        def choice(expert):
            wide, narrow = jax.tree.map(lambda value: value[jnp.maximum(expert, 0)], (gate_up, down))
            return _one(x[None], wide, narrow, (gate_up_input, down_input))[0]

        out = jax.vmap(choice)(ids)
        return jnp.sum(jnp.where(ids[:, None] < 0, 0.0, weights[:, None] * out), axis=0)

    return jax.lax.map(row, (x, ids, weights)).astype(x.dtype)


def _blocked(x, ids, weights, gate_up, down, gate_up_input, down_input):
    """Choices in blocks of one expert each; each block decodes its expert."""
    experts = gate_up.codes.shape[0]
    blocks = lay_out(ids, experts, block_size(ids.size, experts))
    rows = x[blocks.row]

    def step(i, out):
        wide, narrow = jax.tree.map(lambda value: value[blocks.expert[i]], (gate_up, down))
        return out.at[i].set(_one(rows[i], wide, narrow, (gate_up_input, down_input)))

    out = jax.lax.fori_loop(0, blocks.active, step, jnp.zeros(rows.shape, jnp.float32))
    return combine(out.reshape(-1, x.shape[1]), blocks.place, ids, weights).astype(x.dtype)


nvfp4_experts_w4a4 = Op("nvfp4_experts_w4a4", _experts)
nvfp4_experts_w4a4.register("blocked", _blocked)
