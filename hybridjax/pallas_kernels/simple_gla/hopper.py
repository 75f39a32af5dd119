"""SimpleGLA over the tiles of a ragged batch on Hopper GPUs; see ops.simple_gla for the definition.

A program owns one sequence, one head and some columns of the state. Its first warpgroup carries the state in
registers, S <- decay S + k^T (v decayed to the tile's end), and leaves a copy of it before each tile; two
others take turns with the tiles' outputs, masked scores (q k^T) @ v beside decayed q @ S. So the chain from
tile to tile is one product, which hides, like the outputs, behind the bytes of the tiles in flight.

Products have operands of the inputs' dtype (the state is rounded to it for the outputs, never for itself) and
float32 sums. Columns never meet, so that splitting them only repeats q k^T: four parts of 32 heads fill the
132 multiprocessors of an H200.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from hybridjax.batch import TILE
from hybridjax.pallas_kernels.gated_delta.hopper import multiply
from hybridjax.pallas_kernels.state_update import SIZE, swizzled
from hybridjax.pallas_kernels.tiles import choose, describe

HEURISTIC = {"columns": 32, "stages": 4}
_WGMMA = plgpu.Layout.WGMMA
_TRANSPOSED = plgpu.Layout.WGMMA_TRANSPOSED
_ACC = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]
# What one warp leaves to another lies before a commit_smem or a wait for stores, which are barriers of a
# warpgroup, or before an arrival at a Barrier, which all its threads make.
_PARAMETERS = plgpu.CompilerParams(unsafe_no_auto_barriers=True)


def _load(ref) -> jax.Array:
    return plgpu.load(ref, layout=_WGMMA)


def _store_transposed(ref, x: jax.Array) -> None:
    ref.T[...] = plgpu.layout_cast(x, _TRANSPOSED)


def _zeros(*shape: int) -> jax.Array:
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), _WGMMA)


def _iota(axis: int, columns: int) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, (TILE, columns), axis, layout=_WGMMA)


def _clean(ref, low, high) -> None:
    """Zeros in the rows of a tile that hold no token: they may be NaN, which times zero is NaN."""
    x = _load(ref).astype(jnp.float32)
    row = _iota(0, x.shape[1])
    ref[...] = jnp.where((row >= low) & (row < high), x, 0.0).astype(ref.dtype)


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
    columns: int = 0,
    stages: int = 0,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """As ops.simple_gla_prefill for 16-bit q, k, v [N, H, 128] and a float32 pool [slots, H, 128, 128].

    Rows without a token give zeros. The tiles of a sequence stand side by side, those without tokens last.

    Args:
      columns: of a state per program, 32 or 64; stages: tiles in flight per program, up to 4 or 2. 0: as
        ``tuning`` chooses.
      interpret: an InterpretGPUParams of Pallas to run on a CPU.

    Raises:
      ValueError: stages is odd.
    """
    rows, heads, _ = q.shape
    given = {"columns": columns, "stages": stages}
    chosen = choose("simple_gla_prefill", rows, slot.shape[0], heads, HEURISTIC, **given)
    columns, stages = chosen["columns"], chosen["stages"]
    if stages % 2:
        # Else a buffer, and its barriers, would not always belong to the same of the two warpgroups.
        raise ValueError(f"simple_gla_prefill: two warpgroups cannot take turns with {stages} stages")
    sequences, tiles = describe(slot, tile_sequence, positions, initial_slot, snapshot_slot)
    dtype = q.dtype

    def kernel(sequences_ref, tiles_ref, slopes_ref, q_ref, k_ref, v_ref, pool_ref, out_ref, *scratch):
        # Of a buffer. Loaded: a tile is there. Ready: so is the state before it, and a partial tile is clean.
        # Used: the first warpgroup needs the tile no more. The other one then fetches the next into it.
        q_smem, k_smem, v_smem, aged_smem, state_smem, out_smem, loaded, ready, used, *staged = scratch
        sequence, head = jax.lax.axis_index("sequence"), jax.lax.axis_index("head")
        own = pl.ds(jax.lax.axis_index("part") * columns, columns)
        thread = jax.lax.axis_index("thread")
        first, count, live = (sequences_ref[i, sequence] for i in range(3))
        slope = slopes_ref[head]

        def about(tile):
            """First row with a token, the row behind the last, and the snapshot slot of a tile."""
            index = first + jnp.minimum(tile, live - 1)
            return tuple(tiles_ref[i, index] for i in range(3))

        def rows_of(tile):
            return pl.ds((first + tile) * TILE, TILE)

        def buffer_of(tile):
            return jax.lax.rem(tile, jnp.int32(stages))

        def fetch(tile):
            here, buffer = rows_of(tile), buffer_of(tile)
            plgpu.copy_gmem_to_smem(k_ref.at[here, head], k_smem.at[buffer], loaded.at[buffer])
            plgpu.copy_gmem_to_smem(v_ref.at[here, head, own], v_smem.at[buffer], loaded.at[buffer])
            plgpu.copy_gmem_to_smem(q_ref.at[here, head], q_smem.at[buffer], loaded.at[buffer])

        def carry_state():
            source, target = sequences_ref[3, sequence], sequences_ref[4, sequence]
            for tile in range(stages):
                pl.when(tile < live)(functools.partial(fetch, jnp.int32(tile)))

            def stored():
                return plgpu.load(pool_ref.at[source, head, :, own], layout=_WGMMA, optimized=False)

            def keep(state, where):
                pool_ref[where, head, :, own] = state

            def step(tile, carry):
                state, low, high, snapshot = carry
                following = about(tile + 1)  # asked for a tile ahead: the answer takes its time
                buffer = buffer_of(tile)
                k_tile, v_tile, aged = k_smem.at[buffer], v_smem.at[buffer], aged_smem.at[tile & 1]
                # Whoever fetched the tile was done with the state in this buffer.
                plgpu.barrier_wait(loaded.at[buffer])

                @pl.when(high - low < TILE)
                def _():
                    _clean(k_tile, low, high)
                    _clean(v_tile, low, high)
                    plgpu.commit_smem()

                age = jnp.maximum(high - 1 - _iota(0, columns), 0).astype(jnp.float32)
                late = _load(v_tile).astype(jnp.float32) * jnp.exp(-slope * age)
                _store_transposed(state_smem.at[buffer], state.astype(dtype))
                _store_transposed(aged, late.astype(dtype))
                plgpu.commit_smem()
                plgpu.barrier_arrive(ready.at[buffer])

                def add(gain):
                    plgpu.wgmma(gain, k_tile.T, aged.T)
                    return gain[...]

                gain = pl.run_scoped(add, _ACC((SIZE, columns)))
                state = jnp.exp(-slope * (high - low).astype(jnp.float32)) * state + gain
                pl.when(tile + stages < live)(lambda: plgpu.barrier_arrive(used.at[buffer]))
                pl.when(snapshot > 0)(lambda: keep(state, snapshot))
                return state, *following

            # A load would wait behind all the tiles that were asked for.
            state = jax.lax.cond(source >= 0, stored, lambda: _zeros(SIZE, columns))
            state, *_ = jax.lax.fori_loop(0, live, step, (state, *about(0)))
            pl.when(target > 0)(lambda: keep(state, target))

        def write_outputs():
            """Of every second tile."""
            turn = thread - 1
            out_tile = out_smem.at[turn]
            row, column = _iota(0, TILE), _iota(1, TILE)
            distance = jnp.maximum(row - column, 0).astype(jnp.float32)
            fading = jnp.where(row >= column, scale * jnp.exp(-slope * distance), 0.0)

            def put(tile):
                plgpu.copy_smem_to_gmem(out_tile, out_ref.at[rows_of(tile), head, own])

            def step(i, carry):
                low, high = carry
                tile = 2 * i + turn
                following = about(tile + 2)[:2]
                buffer = buffer_of(tile)
                q_tile, k_tile, v_tile = q_smem.at[buffer], k_smem.at[buffer], v_smem.at[buffer]
                plgpu.barrier_wait(loaded.at[buffer])
                plgpu.barrier_wait(ready.at[buffer])

                def attend(scores, old, new):
                    plgpu.wgmma(scores, q_tile, k_tile.T)
                    plgpu.wgmma(old, q_tile, state_smem.at[buffer].T)
                    near = plgpu.wgmma_accumulator_load(scores, wait_n=1) * fading
                    multiply(new, near.astype(dtype), v_tile, staged[0].at[turn] if staged else None)
                    row = _iota(0, columns)
                    rank = jnp.maximum(row - low + 1, 0).astype(jnp.float32)
                    past = scale * jnp.exp(-slope * rank) * plgpu.wgmma_accumulator_load(old, wait_n=1)
                    return jnp.where((row >= low) & (row < high), past + new[...], 0.0)

                sums = _ACC((TILE, TILE)), _ACC((TILE, columns)), _ACC((TILE, columns))
                out = pl.run_scoped(attend, *sums)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                out_tile[...] = out
                plgpu.commit_smem()
                put(tile)

                @pl.when(tile + stages < live)
                def _():
                    plgpu.barrier_wait(used.at[buffer])
                    fetch(tile + stages)

                return following

            @pl.when(turn < live)
            def _():
                steps = jax.lax.div(live - turn + 1, jnp.int32(2))
                jax.lax.fori_loop(0, steps, step, about(turn)[:2])

            @pl.when((live < count) & (turn == 0))
            def _():
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                out_tile[...] = _zeros(TILE, columns)
                plgpu.commit_smem()

                def empty(tile, _):
                    put(tile)
                    return ()

                jax.lax.fori_loop(live, count, empty, ())

            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        pl.when((thread == 0) & (live > 0))(carry_state)
        pl.when(thread > 0)(write_outputs)

    kernel.__name__ = "simple_gla_prefill"
    wide, narrow = swizzled(128, dtype.itemsize), swizzled(2 * columns, dtype.itemsize)
    tile = plgpu.SMEM((stages, TILE, SIZE), dtype, transforms=wide)
    run = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((rows, heads, SIZE), jnp.float32),
        grid=(slot.shape[0], heads, SIZE // columns),
        grid_names=("sequence", "head", "part"),
        num_threads=3,
        thread_name="thread",
        scratch_types=[
            tile,
            tile,
            plgpu.SMEM((stages, TILE, columns), dtype, transforms=narrow),
            # Transposed, for the operands of a product must share a swizzle.
            plgpu.SMEM((2, columns, TILE), dtype, transforms=wide),
            plgpu.SMEM((stages, columns, SIZE), dtype, transforms=wide),
            plgpu.SMEM((2, TILE, columns), jnp.float32, transforms=swizzled(128, 4)),
            plgpu.Barrier(num_arrivals=3, num_barriers=stages),
            *[plgpu.Barrier(num_barriers=stages)] * 2,
            *([plgpu.SMEM((2, TILE, TILE), dtype, transforms=narrow)] if interpret else []),
        ],
        compiler_params=_PARAMETERS,
        interpret=interpret,
    )
    pool_ref = jax.new_ref(pool)
    out = run(sequences, tiles, slopes, q, k, v, pool_ref)
    return out, jax.freeze(pool_ref)
