"""Routed experts on Hopper GPUs: two grouped matmuls over blocks of 64 choices of one expert.

The structure (a pipeline over K into wgmma accumulators) is that of jax's ragged_dot_mgpu. That kernel finds
its group in an unrolled loop over all groups; here the layout is computed beforehand and a block's expert is
one load, so that 512 experts cost no more than 16. Weights are read as stored, [out, in].
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from hybridjax.ops.experts import combine, experts_blocked, lay_out

BLOCK = 64  # rows of a block: the M of one wgmma
_STEP = 64  # elements of K per pipeline step: 128 bytes, one swizzle row


def _grouped(x, expert, active, weights, *, parts: int, tile: int, stages: int, finish, interpret=None):
    """Each block of rows times its expert's matrix, ``parts`` row ranges of the matrix at a time.

    Args:
      x: [blocks * 64, K]; expert: int32[blocks]; active: int32[1] blocks in use.
      weights: [E, parts * F, K].
      tile: output features per program; stages: depth of its pipeline.
      finish: float32[64, tile] accumulators, one per part, to the output [64, tile].

    Returns:
      [blocks * 64, F]; rows of blocks not in use are undefined.
    """
    blocks, steps = expert.shape[0], x.shape[1] // _STEP
    features = weights.shape[1] // parts
    delay = min(1, steps - 1)  # steps whose products may still run when the next one starts

    def kernel(active_ref, expert_ref, x_ref, weights_ref, out_ref):
        block, column = jax.lax.axis_index("block"), jax.lax.axis_index("tile")

        @pl.when(block < active_ref[0])
        def _():
            matrix_ref = weights_ref.at[expert_ref[block]]

            def accumulate(*sums):
                def step(_, x_smem, *weights_smem):
                    for acc, weight in zip(sums, weights_smem):
                        plgpu.wgmma(acc, x_smem, weight.T)
                    # Of the step before, whose buffers are about to be refilled, nothing is in flight.
                    plgpu.wgmma_wait(delay)

                def rows_of(part):
                    return lambda k: (part * (features // tile) + column, k)

                plgpu.emit_pipeline(
                    step,
                    grid=(steps,),
                    in_specs=[
                        plgpu.BlockSpec((BLOCK, _STEP), lambda k: (block, k), delay_release=delay),
                        *(
                            plgpu.BlockSpec((tile, _STEP), rows_of(part), delay_release=delay)
                            for part in range(parts)
                        ),
                    ],
                    max_concurrent_steps=min(stages, steps),
                )(x_ref, *[matrix_ref] * parts)
                return tuple(acc[...] for acc in sums)

            sums = pl.run_scoped(accumulate, *[plgpu.ACC((BLOCK, tile))] * parts)  # pyright: ignore[reportPrivateImportUsage]

            @functools.partial(pl.run_scoped, out_smem=plgpu.SMEM((BLOCK, tile), dtype=out_ref.dtype))
            def _(out_smem):
                out_smem[...] = finish(*sums).astype(out_smem.dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(
                    out_smem, out_ref.at[pl.ds(block * BLOCK, BLOCK), pl.ds(column * tile, tile)]
                )
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((x.shape[0], features), x.dtype),
        grid=(blocks, features // tile),
        grid_names=("block", "tile"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpret,
    )(active, expert, x, weights)


def _swiglu(gate, up):
    return gate * up / (1.0 + jnp.exp(-gate))


def _tile(features: int, largest: int) -> int:
    return next(size for size in (128, 64) if size <= largest and features % size == 0)


def apply(x, ids, weights, gate_up, down, *, gate_tile=64, down_tile=128, stages=4, interpret=None):
    """The forward pass; tiles are output features per program, stages the depth of its pipeline.

    ``interpret`` runs the kernels on a CPU: an InterpretGPUParams of Pallas.
    """
    layout = lay_out(ids, gate_up.shape[0], BLOCK)
    active = layout.active.reshape(1)
    rows = x[layout.row.reshape(-1)]
    hidden = _grouped(
        rows,
        layout.expert,
        active,
        gate_up,
        parts=2,
        tile=_tile(down.shape[2], gate_tile),
        stages=stages,
        finish=_swiglu,
        interpret=interpret,
    )
    out = _grouped(
        hidden,
        layout.expert,
        active,
        down,
        parts=1,
        tile=_tile(x.shape[1], down_tile),
        stages=stages,
        finish=lambda product: product,
        interpret=interpret,
    )
    return combine(out, layout.place, ids, weights).astype(x.dtype)


@jax.custom_vjp
def experts_mosaic_gpu(x, ids, weights, gate_up, down):
    """See ops.experts; bfloat16 or float16. An expert's output is rounded to it before the weighted sum."""
    return apply(x, ids, weights, gate_up, down)


def _forward(*args):
    return experts_mosaic_gpu(*args), args


def _backward(args, gradient):
    x, ids, weights, gate_up, down = args
    _, pull = jax.vjp(lambda *free: experts_blocked(free[0], ids, *free[1:]), x, weights, gate_up, down)
    dx, dweights, dgate_up, ddown = pull(gradient)
    return dx, None, dweights, dgate_up, ddown


experts_mosaic_gpu.defvjp(_forward, _backward)
