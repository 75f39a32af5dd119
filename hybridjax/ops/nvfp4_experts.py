"""Routed experts with NVFP4 weights: ``ops.experts`` on weights that are decoded on the way.

    y[n] = sum_j weights[n, j] * (silu(g) * u) @ down[e]^T,  (g, u) = x[n] @ gate_up[e]^T,  e = ids[n, j]

As in ``ops.nvfp4`` global scales multiply sums: what is multiplied before is exact in the activations' dtype.
Sources: qwen4_exp 9, minicpm_sala 4.1.
"""

import jax
import jax.numpy as jnp

from hybridjax.ops.dispatch import Op, einsum_f32, platform
from hybridjax.ops.experts import activate, block_size, combine, experts_blocked, lay_out
from hybridjax.ops.nvfp4 import kernel_fits
from hybridjax.quantization import GROUP, NVFP4, decode

_GATHER_BYTES = 2**28  # of weights in float32 that a product per choice may make
_DECODED_BYTES = 2**25  # of all experts in float32 that are decoded in each step


def _take(weight: NVFP4, experts: jax.Array) -> NVFP4:
    """The matrices of some experts."""
    return jax.tree.map(lambda x: x[experts], weight)


def _product(spec: str, x: jax.Array, weight: NVFP4) -> jax.Array:
    """einsum of x with decoded matrices, times their global scales; the spec ends with output features."""
    return einsum_f32(spec, x, decode(weight.codes, weight.scales).astype(x.dtype)) * weight.global_scale


def _nvfp4_experts(
    x: jax.Array, ids: jax.Array, weights: jax.Array, gate_up: NVFP4, down: NVFP4
) -> jax.Array:
    """The weighted sum of each row's experts.

    Args:
      x: [N, H] bfloat16, float16 or float32.
      ids: int32[N, k] experts of each row; -1 contributes zero.
      weights: float32[N, k].
      gate_up: stack of [E, 2I, H], gate rows before up rows; global_scale is float32[E, 2I].
      down: stack of [E, H, I]; global_scale is float32[E, H].

    Returns:
      [N, H] in the dtype of x: products and the sum over experts are float32, the activations between
      the two products have the dtype of x.
    """

    def row(item):
        x, ids, weights = item
        chosen = jnp.maximum(ids, 0)
        hidden = activate(_product("h,koh->ko", x, _take(gate_up, chosen)), x.dtype)
        out = _product("ki,khi->kh", hidden, _take(down, chosen))
        return jnp.sum(jnp.where(ids[:, None] < 0, 0.0, weights[:, None] * out), axis=0)

    return jax.lax.map(row, (x, ids, weights)).astype(x.dtype)


def _gather(x, ids, weights, gate_up, down):
    """One product per choice, all at once: for few choices."""
    chosen = jnp.maximum(ids, 0)
    hidden = activate(_product("nh,nkoh->nko", x, _take(gate_up, chosen)), x.dtype)
    out = _product("nki,nkhi->nkh", hidden, _take(down, chosen))
    return jnp.sum(jnp.where(ids[..., None] < 0, 0.0, weights[..., None] * out), axis=1).astype(x.dtype)


def _blocked(x, ids, weights, gate_up, down):
    """Choices in blocks of one expert each, block after block; each decodes its expert."""
    experts = gate_up.codes.shape[0]
    blocks = lay_out(ids, experts, block_size(ids.size, experts))
    rows = x[blocks.row]

    def step(i, out):
        expert = blocks.expert[i]
        hidden = activate(_product("nh,oh->no", rows[i], _take(gate_up, expert)), x.dtype)
        return out.at[i].set(_product("ni,hi->nh", hidden, _take(down, expert)))

    out = jax.lax.fori_loop(0, blocks.active, step, jnp.zeros(rows.shape, jnp.float32))
    return combine(out.reshape(-1, x.shape[1]), blocks.place, ids, weights).astype(x.dtype)


def _hopper(x, ids, weights, gate_up: NVFP4, down: NVFP4) -> bool:
    """Both products in whole tiles, of bfloat16 on a Hopper GPU."""
    return all(
        weight.codes.dtype == jnp.uint32
        and kernel_fits(x.dtype, weight.scales.shape[1], GROUP * weight.scales.shape[2])
        for weight in (gate_up, down)
    )


def _decoded(x, ids, weights, gate_up, down):
    """All experts decoded first, global scales included: where they are few and small, as in tests."""

    def whole(weight: NVFP4) -> jax.Array:
        return decode(weight.codes, weight.scales) * weight.global_scale[..., None]

    return experts_blocked(x, ids, weights, whole(gate_up), whole(down))


def choose(x, ids, weights, gate_up: NVFP4, down: NVFP4) -> str:
    """The XLA form for such shapes: a gather on GPUs, all experts elsewhere, while little is decoded."""
    everything = GROUP * (gate_up.scales.size + down.scales.size) * 4
    if platform() != "gpu":
        return "decoded" if everything <= _DECODED_BYTES else "blocked"
    chosen = everything // gate_up.codes.shape[0] * ids.size
    return "gather" if chosen <= _GATHER_BYTES else "blocked"


def _automatic(*args):
    return nvfp4_experts(*args, implementation=choose(*args))


nvfp4_experts = Op("nvfp4_experts", _nvfp4_experts)
nvfp4_experts.register(
    "mosaic_gpu", "hybridjax.pallas_kernels.nvfp4:experts", platforms=("gpu",), supports=_hopper
)
nvfp4_experts.register("xla", _automatic)
nvfp4_experts.register("gather", _gather)
nvfp4_experts.register("blocked", _blocked)
nvfp4_experts.register("decoded", _decoded)
