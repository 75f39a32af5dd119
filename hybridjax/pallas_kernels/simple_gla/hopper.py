"""SimpleGLA over the tiles of a ragged batch on Hopper GPUs; see ops.simple_gla for the definition.

A program owns one sequence, one head and some columns of the state, which stays in registers from tile to
tile. Per tile it forms masked scores q k^T and adds scores @ v to the decayed q @ state; the state then
decays and gains k^T @ (decayed v). Products have operands of the inputs' dtype (the state is rounded to it
for the outputs, never for itself) and float32 sums. Columns never meet, so that splitting them only repeats
q k^T: four parts of 32 heads fill the 132 multiprocessors of an H200.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from hybridjax.batch import TILE
from hybridjax.pallas_kernels.state_update import SIZE, swizzled
from hybridjax.pallas_kernels.tiles import describe

_WGMMA = plgpu.Layout.WGMMA


_ACC = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]


def _load(ref) -> jax.Array:
    return plgpu.load(ref, layout=_WGMMA)


def _rows_between(low, high, columns: int) -> jax.Array:
    row = plgpu.broadcasted_iota(jnp.int32, (TILE, columns), 0, layout=_WGMMA)
    return (row >= low) & (row < high)


def _clean(ref, low, high) -> None:
    """Zeros in the rows of a tile that hold no token: they may be NaN, which times zero is NaN."""
    x = _load(ref).astype(jnp.float32)
    ref[...] = jnp.where(_rows_between(low, high, x.shape[1]), x, 0.0).astype(ref.dtype)


@functools.partial(jax.jit, static_argnames=("scale", "columns", "stages", "interpret"))
def prefill(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    slopes: jax.Array,
    pool: jax.Array,
    slot: jax.Array,
    tile_sequence: jax.Array,
    positions: jax.Array,
    *,
    scale: float,
    initial_slot: jax.Array | None = None,
    snapshot_slot: jax.Array | None = None,
    columns: int = 32,
    stages: int = 2,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """As ops.simple_gla_prefill for 16-bit q, k, v [N, H, 128] and a float32 pool [slots, H, 128, 128].

    Rows without a token give zeros. The tiles of a sequence stand side by side, those without tokens last.

    Args:
      columns: of a state per program, 32 or 64; stages: tiles in flight per program.
      interpret: an InterpretGPUParams of Pallas to run on a CPU.
    """
    rows, heads, _ = q.shape
    sequences, tiles = describe(slot, tile_sequence, positions, initial_slot, snapshot_slot)
    dtype, swizzle = q.dtype, 2 * columns

    def kernel(sequences_ref, tiles_ref, slopes_ref, q_ref, k_ref, v_ref, pool_ref, out_ref, *scratch):
        (
            q_smem,
            k_smem,
            v_smem,
            aged_smem,
            scores_smem,
            state_smem,
            pool_smem,
            out_smem,
            loaded,
            pool_loaded,
        ) = scratch
        sequence, head = jax.lax.axis_index("sequence"), jax.lax.axis_index("head")
        own = pl.ds(jax.lax.axis_index("part") * columns, columns)
        first, count, live = (sequences_ref[i, sequence] for i in range(3))
        source, target = sequences_ref[3, sequence], sequences_ref[4, sequence]
        slope = slopes_ref[head]

        def fetch(tile):
            here, buffer = pl.ds((first + tile) * TILE, TILE), jax.lax.rem(tile, jnp.int32(stages))
            plgpu.copy_gmem_to_smem(q_ref.at[here, head], q_smem.at[buffer], loaded.at[buffer])
            plgpu.copy_gmem_to_smem(k_ref.at[here, head], k_smem.at[buffer], loaded.at[buffer])
            plgpu.copy_gmem_to_smem(v_ref.at[here, head, own], v_smem.at[buffer], loaded.at[buffer])

        def keep(state, where):
            """Writes the state to a slot of the pool."""
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            pool_smem[...] = state
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(pool_smem, pool_ref.at[where, head, :, own])

        @pl.when(live > 0)
        def _():
            for tile in range(stages):
                pl.when(tile < live)(functools.partial(fetch, jnp.int32(tile)))

            @pl.when(source >= 0)
            def _():
                plgpu.copy_gmem_to_smem(pool_ref.at[source, head, :, own], pool_smem, pool_loaded)
                plgpu.barrier_wait(pool_loaded)

            state = _load(pool_smem)
            state = jnp.where(jax.lax.broadcast_in_dim(source, state.shape, ()) >= 0, state, 0.0)
            plgpu.commit_smem()
            state_smem[...] = state.astype(dtype)

            row, column = (
                plgpu.broadcasted_iota(jnp.int32, (TILE, TILE), axis, layout=_WGMMA) for axis in range(2)
            )
            distance = (row - column).astype(jnp.float32)
            fading = jnp.where(row >= column, scale * jnp.exp(-slope * jnp.maximum(distance, 0.0)), 0.0)

            def about(tile):
                """First row with a token, the row behind the last, and the snapshot slot of a tile."""
                index = first + jnp.minimum(tile, live - 1)
                return tuple(tiles_ref[i, index] for i in range(3))

            def step(tile, carry):
                state, low, high, snapshot = carry
                following = about(tile + 1)  # asked for a tile ahead: the answer takes its time
                buffer = jax.lax.rem(tile, jnp.int32(stages))
                q_tile, k_tile, v_tile = q_smem.at[buffer], k_smem.at[buffer], v_smem.at[buffer]
                plgpu.barrier_wait(loaded.at[buffer])

                @pl.when(high - low < TILE)
                def _():
                    _clean(k_tile, low, high)
                    _clean(v_tile, low, high)

                row = plgpu.broadcasted_iota(jnp.int32, (TILE, columns), 0, layout=_WGMMA)
                age = jnp.maximum(high - 1 - row, 0).astype(jnp.float32)
                aged_smem[...] = (_load(v_tile).astype(jnp.float32) * jnp.exp(-slope * age)).astype(dtype)
                plgpu.commit_smem()

                def read(scores, out):
                    plgpu.wgmma(scores, q_tile, k_tile.T)
                    plgpu.wgmma(out, q_tile, state_smem)
                    return scores[...], out[...]

                scores, old = pl.run_scoped(read, _ACC((TILE, TILE)), _ACC((TILE, columns)))
                scores_smem[...] = (scores * fading).astype(dtype)
                plgpu.commit_smem()

                def write(out, gain):
                    plgpu.wgmma(out, scores_smem, v_tile)
                    plgpu.wgmma(gain, k_tile.T, aged_smem)
                    return out[...], gain[...]

                new, gain = pl.run_scoped(write, _ACC((TILE, columns)), _ACC((SIZE, columns)))
                rank = jnp.maximum(row - low + 1, 0).astype(jnp.float32)
                out = scale * jnp.exp(-slope * rank) * old + new
                out = jnp.where((row >= low) & (row < high), out, 0.0)
                state = jnp.exp(-slope * (high - low).astype(jnp.float32)) * state + gain

                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                state_smem[...] = state.astype(dtype)
                out_smem[...] = out
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(out_smem, out_ref.at[pl.ds((first + tile) * TILE, TILE), head, own])
                pl.when(tile + stages < live)(lambda: fetch(tile + stages))
                pl.when(snapshot > 0)(lambda: keep(state, snapshot))
                return state, *following

            state, *_ = jax.lax.fori_loop(0, live, step, (state, *about(0)))
            pl.when(target > 0)(lambda: keep(state, target))

        @pl.when(live < count)
        def _():
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            out_smem[...] = plgpu.layout_cast(jnp.zeros((TILE, columns), jnp.float32), _WGMMA)
            plgpu.commit_smem()

            def empty(tile, _):
                plgpu.copy_smem_to_gmem(out_smem, out_ref.at[pl.ds((first + tile) * TILE, TILE), head, own])
                return ()

            jax.lax.fori_loop(live, count, empty, ())

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    kernel.__name__ = "simple_gla_prefill"
    narrow, wide = swizzled(swizzle, dtype.itemsize), swizzled(128, 4)
    run = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((rows, heads, SIZE), jnp.float32),
        grid=(slot.shape[0], heads, SIZE // columns),
        grid_names=("sequence", "head", "part"),
        scratch_types=[
            plgpu.SMEM((stages, TILE, SIZE), dtype, transforms=narrow),
            plgpu.SMEM((stages, TILE, SIZE), dtype, transforms=narrow),
            plgpu.SMEM((stages, TILE, columns), dtype, transforms=narrow),
            plgpu.SMEM((TILE, columns), dtype, transforms=narrow),
            plgpu.SMEM((TILE, TILE), dtype, transforms=narrow),
            plgpu.SMEM((SIZE, columns), dtype, transforms=narrow),
            plgpu.SMEM((SIZE, columns), jnp.float32, transforms=wide),
            plgpu.SMEM((TILE, columns), jnp.float32, transforms=wide),
            plgpu.Barrier(num_arrivals=3, num_barriers=stages),
            plgpu.Barrier(),
        ],
        interpret=interpret,
    )
    pool_ref = jax.new_ref(pool)
    out = run(sequences, tiles, slopes, q, k, v, pool_ref)
    return out, jax.freeze(pool_ref)
