"""The implementation of ``nvfp4_experts``: two grouped products, see ``kernel``.

Few choices are blocks of one token each, in the order of the ids: an expert that two tokens chose is read
twice, but nothing has to be laid out, and where it can the second product activates the results of the first
itself: two kernels, and the sum over a token's choices. Otherwise blocks hold tokens of one expert each.
"""

import functools

import jax
import jax.numpy as jnp

from hybridjax.ops.experts import activate, block_size, combine, lay_out
from hybridjax.ops.nvfp4 import BLOCK_ROWS
from hybridjax.pallas_kernels.nvfp4.kernel import Tuning, may_activate, product, shared_memory
from hybridjax.quantization import GROUP, NVFP4

_ALONE = 0.375  # choices per expert up to which each is a block of its own
_SMALLEST = 8  # tokens of other blocks: fewer take as long
_LITTLE = 100 * 1024  # bytes of shared memory


@functools.partial(jax.jit, static_argnames=("alone", "tunings", "interpret"))
def experts(
    x,
    ids,
    weights,
    gate_up: NVFP4,
    down: NVFP4,
    *,
    alone: bool | None = None,
    tunings: tuple[Tuning, Tuning] | None = None,
    interpret=None,
):
    """See ops.nvfp4_experts; x is bfloat16.

    ``alone`` makes each choice a block, None where that is better; ``tunings`` are those of the two products.
    """
    count, (rows, k) = gate_up.codes.shape[0], ids.shape
    if alone is None:
        alone = ids.size <= _ALONE * count
    if alone:
        size, expert, active = 1, ids.reshape(-1), None
        tokens, share = x, k
    else:
        largest = BLOCK_ROWS if shared_memory() > _LITTLE else BLOCK_ROWS // 2
        size = min(largest, max(_SMALLEST, block_size(ids.size, count)))
        layout = lay_out(ids, count, size)
        expert, active = layout.expert, layout.active.reshape(1)
        tokens, share = x[layout.row.reshape(-1)], 1

    def through(tokens, weight: NVFP4, share: int, which: int, swiglu: bool = False) -> jax.Array:
        return product(
            tokens,
            weight.codes,
            weight.scales,
            weight.global_scale,
            expert,
            active,
            tokens=size,
            share=share,
            out_dtype=jnp.float32,
            swiglu=swiglu,
            tuning=tunings[which] if tunings else None,
            interpret=interpret,
        )

    hidden = through(tokens, gate_up, share, 0)
    swiglu = bool(alone) and may_activate(down.scales.shape[2] * GROUP)
    if not swiglu:
        hidden = activate(jnp.sum(hidden, axis=0), x.dtype)
    out = jnp.sum(through(hidden, down, 1, 1, swiglu), axis=0)
    place = jnp.arange(ids.size, dtype=jnp.int32).reshape(rows, k) if alone else layout.place
    return combine(out, place, ids, weights).astype(x.dtype)
