"""The routed experts of a mixture: each row goes through the SwiGLU of its k experts.

    y[n] = sum_j weights[n, j] * (silu(g) * u) @ down[e]^T,  (g, u) = x[n] @ gate_up[e]^T,  e = ids[n, j]

Every choice is computed (dropless) and shapes are static. Source: qwen4_exp 9.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from hybridjax.ops.dispatch import Op, einsum_f32, matmul_precision, platform

_LARGEST_BLOCK = 64
_TILE = 64  # what the GPU kernel divides both widths into
_GATHER_SHARE = 0.375  # choices per expert up to which one product per choice beats grouping on Hopper
_DENSE_SCRATCH_BYTES = 2**30
_PAIRWISE = 8192  # choices up to which comparing all pairs beats a sort on a GPU


def activate(gate_up: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """float32[..., 2I] -> silu(gate) * up [..., I], rounded to ``dtype``."""
    gate, up = jnp.split(gate_up, 2, axis=-1)
    return (jax.nn.silu(gate) * up).astype(dtype)


def _experts(
    x: jax.Array, ids: jax.Array, weights: jax.Array, gate_up: jax.Array, down: jax.Array
) -> jax.Array:
    """The weighted sum of each row's experts.

    Args:
      x: [N, H].
      ids: int32[N, k] experts of each row; -1 contributes zero.
      weights: float32[N, k].
      gate_up: [E, 2I, H], gate rows before up rows; down: [E, H, I].

    Returns:
      [N, H] in the dtype of x: products and the sum over experts are float32, the activations between
      the two products have the dtype of x.
    """

    def row(item):
        x, ids, weights = item
        chosen = jnp.maximum(ids, 0)
        hidden = activate(einsum_f32("koh,h->ko", gate_up[chosen], x), x.dtype)
        out = einsum_f32("khi,ki->kh", down[chosen], hidden)
        return jnp.sum(jnp.where(ids[:, None] < 0, 0.0, weights[:, None] * out), axis=0)

    return jax.lax.map(row, (x, ids, weights)).astype(x.dtype)


def _experts_dense(x, ids, weights, gate_up, down):
    """All experts for all rows: for few experts, and a row's result never depends on its neighbours."""
    hidden = activate(einsum_f32("nh,eoh->neo", x, gate_up), x.dtype)
    out = einsum_f32("nei,ehi->neh", hidden, down)
    experts = jnp.arange(gate_up.shape[0], dtype=jnp.int32)
    each = jnp.where(ids[..., None] == experts, weights[..., None], 0.0).sum(axis=1)
    return jnp.sum(jnp.where(each[..., None] == 0, 0.0, each[..., None] * out), axis=1).astype(x.dtype)


def _experts_gather(x, ids, weights, gate_up, down):
    """One product per choice. Sums, not matmuls: XLA fuses the gather of the weights into them on GPUs."""
    chosen = jnp.maximum(ids, 0)
    wide = x.astype(jnp.float32)[:, None, None, :]
    hidden = activate(jnp.sum(gate_up[chosen].astype(jnp.float32) * wide, axis=-1), x.dtype)
    out = jnp.sum(down[chosen].astype(jnp.float32) * hidden.astype(jnp.float32)[:, :, None, :], axis=-1)
    return jnp.sum(jnp.where(ids[..., None] < 0, 0.0, weights[..., None] * out), axis=1).astype(x.dtype)


def _experts_ragged(x, ids, weights, gate_up, down):
    """Choices sorted by expert, ``jax.lax.ragged_dot`` and back; only TPUs lower it to grouped matmuls."""
    rows, k = ids.shape
    experts = gate_up.shape[0]
    flat = jnp.where(ids < 0, experts, ids).reshape(-1)
    order = jnp.argsort(flat)
    sizes = jnp.zeros((experts + 1,), jnp.int32).at[flat].add(1)[:experts]

    def product(rows, matrices):
        matrices = jnp.swapaxes(matrices, 1, 2)
        if platform() == "cpu":
            rows, matrices = rows.astype(jnp.float32), matrices.astype(jnp.float32)
        precision = matmul_precision(rows.dtype, matrices.dtype)
        return jax.lax.ragged_dot(
            rows, matrices, sizes, precision=precision, preferred_element_type=jnp.float32
        )

    hidden = activate(product(x[order // k], gate_up), x.dtype)
    out = jnp.zeros((rows * k, x.shape[1]), jnp.float32).at[order].set(product(hidden, down))
    out = out.reshape(rows, k, -1)
    return jnp.sum(jnp.where(ids[..., None] < 0, 0.0, weights[..., None] * out), axis=1).astype(x.dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Blocks:
    """Choices laid out by expert, each expert's run padded to whole blocks.

    Attributes:
      row: int32[blocks, size] the row of x at each place, 0 where there is none.
      expert: int32[blocks] the expert of each block, 0 where there is none.
      active: int32 blocks in use, a prefix.
      place: int32[N, k] place of each choice in the flattened layout, 0 for id -1.
    """

    row: jax.Array
    expert: jax.Array
    active: jax.Array
    place: jax.Array


def _ranks(flat: jax.Array, groups: int, pairwise: bool) -> jax.Array:
    """int32[n]: how many equal values stand before each of int32[n] values in 0..groups-1."""
    index = jnp.arange(flat.size, dtype=jnp.int32)
    if pairwise:
        earlier = (flat[None, :] == flat[:, None]) & (index[None, :] < index[:, None])
        return jnp.sum(earlier, axis=1, dtype=jnp.int32)
    counts = jnp.zeros((groups,), jnp.int32).at[flat].add(1)
    order = jnp.argsort(flat)
    first = jnp.cumsum(counts) - counts
    return jnp.zeros_like(flat).at[order].set(index - first[flat[order]])


def lay_out(ids: jax.Array, experts: int, size: int, pairwise: bool | None = None) -> Blocks:
    """The blocked layout of int32[N, k] expert ids, with blocks of ``size`` rows.

    ``pairwise`` ranks choices by comparing all pairs, without a sort; None: where that is faster.
    """
    rows, k = ids.shape
    choices = rows * k
    if pairwise is None:
        pairwise = platform() == "gpu" and choices <= _PAIRWISE
    filled = min(choices, experts)
    blocks = filled + (choices - filled) // size
    flat = jnp.where(ids < 0, experts, ids).reshape(-1)
    every = jnp.arange(experts, dtype=jnp.int32)
    counts = jnp.zeros((experts + 1,), jnp.int32).at[flat].add(1)[:experts]
    used = -(-counts // size)
    # Sums over comparisons, not cumsum and searchsorted: on GPUs those are many small launches.
    end = jnp.sum(jnp.where(every[None, :] <= every[:, None], used[None, :], 0), axis=1, dtype=jnp.int32)
    index = jnp.arange(blocks, dtype=jnp.int32)
    expert = jnp.sum(end[None, :] <= index[:, None], axis=1, dtype=jnp.int32)
    start = jnp.append((end - used) * size, blocks * size)
    live = flat < experts
    place = jnp.where(live, start[flat] + _ranks(flat, experts + 1, pairwise), blocks * size)
    source = jnp.arange(choices, dtype=jnp.int32) // k
    row = jnp.zeros((blocks * size + 1,), jnp.int32).at[place].set(source)[:-1]
    return Blocks(
        row=row.reshape(blocks, size),
        expert=jnp.where(expert < experts, expert, 0),
        active=end[-1],
        place=jnp.where(live, place, 0).reshape(rows, k),
    )


def combine(out: jax.Array, place: jax.Array, ids: jax.Array, weights: jax.Array) -> jax.Array:
    """float32[N, H]: the weighted sum of each row's places in out [places, H]."""
    chosen = out[place].astype(jnp.float32)
    return jnp.sum(jnp.where(ids[..., None] < 0, 0.0, weights[..., None] * chosen), axis=1)


def _block(x, gate_up, down):
    """One block through one expert: [size, H] -> float32[size, H]."""
    return einsum_f32("ni,hi->nh", activate(einsum_f32("nh,oh->no", x, gate_up), x.dtype), down)


@jax.custom_vjp
def _through_blocks(x, expert, active, gate_up, down):
    """x [blocks, size, H] -> float32[blocks, size, H]; a loop over the blocks in use only."""

    def step(i, out):
        return out.at[i].set(_block(x[i], gate_up[expert[i]], down[expert[i]]))

    return jax.lax.fori_loop(0, active, step, jnp.zeros(x.shape, jnp.float32))


def _through_blocks_forward(x, expert, active, gate_up, down):
    return _through_blocks(x, expert, active, gate_up, down), (x, expert, active, gate_up, down)


def _through_blocks_backward(saved, gradient):
    # Written out because the transpose of the loop would add arrays of all experts in every step.
    x, expert, active, gate_up, down = saved

    def step(i, sums):
        dx, dgate_up, ddown = sums
        e = expert[i]
        _, pull = jax.vjp(_block, x[i], gate_up[e], down[e])
        one = pull(gradient[i])
        return (
            dx.at[i].set(one[0]),
            dgate_up.at[e].add(one[1].astype(jnp.float32)),
            ddown.at[e].add(one[2].astype(jnp.float32)),
        )

    zeros = (jnp.zeros_like(x), jnp.zeros(gate_up.shape, jnp.float32), jnp.zeros(down.shape, jnp.float32))
    dx, dgate_up, ddown = jax.lax.fori_loop(0, active, step, zeros)
    return dx, None, None, dgate_up.astype(gate_up.dtype), ddown.astype(down.dtype)


_through_blocks.defvjp(_through_blocks_forward, _through_blocks_backward)


def block_size(choices: int, experts: int) -> int:
    """Rows per block: about what an expert gets, a power of two up to 64."""
    return min(_LARGEST_BLOCK, 2 ** max(0, math.ceil(math.log2(max(1, choices / experts)))))


def experts_blocked(x, ids, weights, gate_up, down):
    """Choices in blocks of one expert each, block after block: work and reads follow what is used."""
    experts = gate_up.shape[0]
    blocks = lay_out(ids, experts, block_size(ids.size, experts))
    out = _through_blocks(x[blocks.row], blocks.expert, blocks.active, gate_up, down)
    return combine(out.reshape(-1, x.shape[1]), blocks.place, ids, weights).astype(x.dtype)


def _hopper(x, ids, weights, gate_up, down) -> bool:
    """A Hopper GPU, 16-bit weights and activations of one dtype, sizes in whole tiles."""
    device = jax.config.jax_default_device or jax.devices()[0]  # pyright: ignore[reportAttributeAccessIssue]
    sixteen = x.dtype in (jnp.bfloat16, jnp.float16) and x.dtype == gate_up.dtype == down.dtype
    whole = x.shape[1] % _TILE == 0 and down.shape[2] % _TILE == 0
    return sixteen and whole and getattr(device, "compute_capability", "") == "9.0"


def choose(x, ids, weights, gate_up, down) -> str:
    """The implementation that was fastest for such shapes: benchmarks/results/*_experts.txt.

    A gather reads an expert once per choice, the others once per step: it wins while few choices share one.
    Dense work reads all experts, which on GPUs without a kernel of their own still beats a loop over blocks.
    TPUs were not measured; ``ragged_dot`` is the one that XLA compiles to a grouped matmul there.
    """
    where, count = platform(), gate_up.shape[0]
    if where != "gpu":
        return "ragged" if where == "tpu" else "blocked"
    hopper = _hopper(x, ids, weights, gate_up, down)
    if ids.size <= count * (_GATHER_SHARE if hopper else 1.0):
        return "gather"
    if hopper:
        return "mosaic_gpu"
    scratch = 4 * x.shape[0] * count * (gate_up.shape[1] + sum(down.shape[1:]))
    return "dense" if scratch <= _DENSE_SCRATCH_BYTES else "blocked"


def _experts_automatic(*args):
    return experts(*args, implementation=choose(*args))


experts = Op("experts", _experts)
experts.register("automatic", _experts_automatic)
experts.register(
    "mosaic_gpu", "hybridjax.pallas_kernels.experts:experts_mosaic_gpu", platforms=("gpu",), supports=_hopper
)
experts.register("blocked", experts_blocked)
experts.register("dense", _experts_dense)
experts.register("gather", _experts_gather)
experts.register("ragged", _experts_ragged)
