"""The gated delta rule over the tiles of a ragged batch on Hopper GPUs; see ops.gated_delta.

Within a tile the corrections d solve a triangular system. One kernel solves it for all tiles, as an inverse;
the other carries the state through a sequence's tiles, one program per sequence, value head and 64 columns of
the state. With the decays ``fade`` from the tile's start and ``rest`` to its end:

    d = inverse (v - fade (k S)),   o = fade (q S) + scores d,   S <- fade_end S + k^T (rest d)

The second kernel computes everything transposed: the state is then the left operand of its products and stays
in registers from tile to tile, and so do the corrections; shared memory holds what the first kernel and the
model wrote, nothing that one product hands to the next. The norms of q and k are factors of rows of products,
so that no normalised copy is made. Sums are float32; q, k, the state where it is read and what is added to it
have the inputs' dtype in products, everything between the two kernels float16, which has three more bits for
numbers that are about one (corrections beyond 65504 would overflow).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from hybridjax.batch import TILE
from hybridjax.pallas_kernels.state_update import SIZE, multiprocessors, swizzled
from hybridjax.pallas_kernels.tiles import choose, describe

HEURISTIC = {"stages": 2}
_NORM_EPS = 1e-6
_LEAST = -100.0  # a smaller logarithm of a decay is zero in float32 too, and sums of it would lose digits
_WGMMA = plgpu.Layout.WGMMA
_TRANSPOSED = plgpu.Layout.WGMMA_TRANSPOSED
_ACC = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]
_SQUARE = (TILE, TILE)
_OWN = jnp.float16  # of what the two kernels compute between them: elements of about one
# What one warp leaves to another always lies before a commit_smem here, which is a barrier.
_PARAMETERS = plgpu.CompilerParams(unsafe_no_auto_barriers=True)
# Rows of the factors of a tile and head, as the first kernel leaves them.
_KNOWN, _OUT, _GAIN, _END, _FACTORS = range(5)


def _load(ref) -> jax.Array:
    return plgpu.load(ref, layout=_WGMMA)


def _store_transposed(ref, x: jax.Array) -> None:
    ref.T[...] = plgpu.layout_cast(x, _TRANSPOSED)


def by_row(ref) -> jax.Array:
    """A float32[64] reference, an element per row of a tile."""
    return plgpu.load(ref, layout=_WGMMA.reduce(1), optimized=False)


def spread(x: jax.Array, columns: int) -> jax.Array:
    return jax.lax.broadcast_in_dim(x, (TILE, columns), (0,))


def by_column(ref, rows: int = TILE, layout: Any = _WGMMA) -> jax.Array:
    """A float32 reference, an element per column, spread over the rows."""
    x = plgpu.load(ref, layout=layout.reduce(0), optimized=False)
    return jax.lax.broadcast_in_dim(x, (rows, x.shape[0]), (1,))


def multiply(acc, left: jax.Array, right, staged) -> None:
    """acc += left @ right with the left side in registers; interpretation needs it in memory, ``staged``."""
    if staged is None:
        plgpu.wgmma(acc, left, right)
    else:
        staged[...] = left
        plgpu.commit_smem()
        plgpu.wgmma(acc, staged, right)


def _iota(axis: int, columns: int = TILE) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, (TILE, columns), axis, layout=_WGMMA)


def invert(system: jax.Array, row, column, x_smem, product_smem, staged) -> jax.Array:
    """(I + system)^-1 of a strictly lower triangle, float16[64, 64], in float32.

    Inverses of blocks on the diagonal, of one row at first, are merged in pairs: [[X, 0], [-Y B X, Y]]. All
    of them have small elements, unlike the terms of a power series.

    Args:
      row, column: the indices of the elements.
      x_smem, product_smem: float16[64, 64] of scratch; staged: as in ``multiply``.
    """

    def beside(size):
        """Blocks of this size left or right of a diagonal one; nothing here has values to the right."""
        shift = size.bit_length() - 1
        return (jax.lax.shift_right_logical(column, shift) ^ 1) == jax.lax.shift_right_logical(row, shift)

    inverse = jnp.where(row == column, 1.0, 0.0) - jnp.where(beside(1), system.astype(jnp.float32), 0.0)
    size = 2
    while size < TILE:
        narrow = inverse.astype(x_smem.dtype)
        x_smem[...] = narrow
        plgpu.commit_smem()

        def right(acc):
            multiply(acc, system, x_smem, staged)
            return acc[...]

        product_smem[...] = pl.run_scoped(right, _ACC(_SQUARE)).astype(x_smem.dtype)
        plgpu.commit_smem()

        def left(acc, narrow=narrow):
            multiply(acc, narrow, product_smem, staged)
            return acc[...]

        inverse = inverse - jnp.where(beside(size), pl.run_scoped(left, _ACC(_SQUARE)), 0.0)
        size *= 2
    return inverse


def _solve(q, k, g, beta, tiles, interpret):
    """What each tile and value head needs beyond the state.

    Args:
      q, k: [N, Hk, 128]; g, beta: float32[Hv, N], zero in rows without a token; tiles: of ``describe``.

    Returns:
      inverse and scores, [N, Hv, 64]: (I + A)^-1 diag(beta) with A the strictly lower part of
      beta_i (k_i k_j) decay_ij, and the lower part of (q_i k_j) decay_ij, of normalised q and k; and the
      factors float32[N / 64, Hv, 4, 64]. All undefined in tiles without tokens.
    """
    rows, heads = q.shape[0], g.shape[0]
    share = heads // q.shape[1]
    dtype = q.dtype
    # Heads that share a key head share a block: three leave 168 registers to a thread, enough without spills.
    threads = next(n for n in (3, 2, 1) if share % n == 0)
    groups = heads // threads
    total = rows // TILE * groups
    programs = min(total, multiprocessors())

    def gated_delta_solve(
        tiles_ref, q_ref, k_ref, g_ref, beta_ref, inverse_ref, scores_ref, factors_ref, *scratch
    ):
        q_smem, k_smem, g_smem, beta_smem, *mine, loaded, free = scratch
        program, thread = jax.lax.axis_index("program"), jax.lax.axis_index("thread")

        def piece(step):
            """Tile, first head and buffer of a step."""
            index = step * programs + program
            return jax.lax.div(index, groups), jax.lax.rem(index, groups) * threads, step & 1

        def fetch(step):
            tile, head, buffer = piece(step)
            here, key_head = pl.ds(tile * TILE, TILE), jax.lax.div(head, jnp.int32(share))
            plgpu.copy_gmem_to_smem(q_ref.at[here, key_head], q_smem.at[buffer], loaded.at[buffer])
            plgpu.copy_gmem_to_smem(k_ref.at[here, key_head], k_smem.at[buffer], loaded.at[buffer])
            for gate_ref, smem in ((g_ref, g_smem), (beta_ref, beta_smem)):
                gates = gate_ref.at[pl.ds(head, threads), here]
                plgpu.copy_gmem_to_smem(gates, smem.at[buffer], loaded.at[buffer])

        pl.when(thread == 0)(lambda: fetch(jnp.int32(0)))

        def step(step, _):
            tile, head, buffer = piece(step)
            head += thread
            here = pl.ds(tile * TILE, TILE)
            low, high = tiles_ref[0, tile], tiles_ref[1, tile]
            # Zero, which the compiler cannot know: indices and addresses kept over the loop would not fit.
            zero = jnp.minimum(low, 0)
            row, column = _iota(0) + zero, _iota(1) + zero
            own = [x.at[thread + zero] for x in mine]
            x_smem, product_smem, inverse_smem, scores_smem, factors_smem, *staged = own

            @pl.when((thread == 0) & ((step + 1) * programs + program < total))
            def _():
                pl.when(step > 0)(lambda: plgpu.barrier_wait(free.at[1 - buffer]))
                fetch(step + 1)

            plgpu.barrier_wait(loaded.at[buffer])

            @pl.when(low < high)
            def _():
                q_tile, k_tile = q_smem.at[buffer], k_smem.at[buffer]
                wide = _load(q_tile).astype(jnp.float32)
                query_scale = SIZE**-0.5 * jax.lax.rsqrt(jnp.sum(wide * wide, axis=1) + _NORM_EPS)
                held = (row >= low) & (row < high) & (column >= low)  # column <= row besides
                sums = jnp.sum(jnp.where(column <= row, by_column(g_smem.at[buffer, thread]), 0.0), axis=1)

                def products(alike, scores):
                    plgpu.wgmma(alike, k_tile, k_tile.T)
                    plgpu.wgmma(scores, q_tile, k_tile.T)
                    return alike[...], scores[...]

                alike, scores = pl.run_scoped(products, _ACC(_SQUARE), _ACC(_SQUARE))
                alike, scores = (jnp.where(held & (row >= column), x, 0.0) for x in (alike, scores))
                squares = jnp.sum(jnp.where(row == column, alike, 0.0), axis=1)
                key_scale = jax.lax.rsqrt(squares + _NORM_EPS)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                factors_smem[_KNOWN] = key_scale
                factors_smem[_GAIN] = sums
                plgpu.commit_smem()
                decay = jnp.exp(jnp.minimum(spread(sums, TILE) - by_column(factors_smem.at[_GAIN]), 0.0))
                decay = decay * by_column(factors_smem.at[_KNOWN])
                total_sum = factors_smem[_GAIN, TILE - 1]
                fade = jnp.exp(sums)
                scores_smem[...] = (scores * decay * spread(query_scale, TILE)).astype(_OWN)
                rate = by_row(beta_smem.at[buffer, thread]) * key_scale
                system = jnp.where(row == column, 0.0, alike * decay * spread(rate, TILE)).astype(_OWN)
                plgpu.commit_smem()
                factors_smem[_KNOWN] = fade * key_scale
                factors_smem[_OUT] = fade * query_scale
                factors_smem[_GAIN] = jnp.exp(total_sum - sums) * key_scale
                factors_smem[_END] = jnp.exp(total_sum + 0.0 * sums)
                inverse = invert(system, row, column, x_smem, product_smem, staged[0] if staged else None)
                inverse_smem[...] = (inverse * by_column(beta_smem.at[buffer, thread])).astype(_OWN)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(scores_smem, scores_ref.at[here, head])
                plgpu.copy_smem_to_gmem(inverse_smem, inverse_ref.at[here, head])
                plgpu.copy_smem_to_gmem(factors_smem, factors_ref.at[tile, head])

            @pl.when((step + 2) * programs + program < total)
            def _():
                plgpu.barrier_arrive(free.at[buffer])

            return ()

        jax.lax.fori_loop(0, jax.lax.div(total - 1 - program, jnp.int32(programs)) + 1, step, ())
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    out = jax.ShapeDtypeStruct((rows, heads, TILE), _OWN)
    narrow = swizzled(128, 2)
    square = plgpu.SMEM((threads, *_SQUARE), _OWN, transforms=narrow)
    return plgpu.kernel(
        gated_delta_solve,
        out_type=(out, out, jax.ShapeDtypeStruct((rows // TILE, heads, _FACTORS, TILE), jnp.float32)),
        grid=(programs,),
        grid_names=("program",),
        num_threads=threads,
        thread_name="thread",
        scratch_types=[
            plgpu.SMEM((2, TILE, SIZE), dtype, transforms=narrow),
            plgpu.SMEM((2, TILE, SIZE), dtype, transforms=narrow),
            plgpu.SMEM((2, threads, TILE), jnp.float32),
            plgpu.SMEM((2, threads, TILE), jnp.float32),
            *[square] * 4,
            plgpu.SMEM((threads, _FACTORS, TILE), jnp.float32),
            *([square] if interpret else []),
            plgpu.Barrier(num_arrivals=4, num_barriers=2),
            plgpu.Barrier(num_arrivals=threads, num_barriers=2),
        ],
        compiler_params=_PARAMETERS,
        interpret=interpret,
    )(tiles, q, k, g, beta)


@functools.partial(jax.jit, static_argnames=("stages", "interpret"))
def prefill(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    pool: jax.Array,
    slot: jax.Array,
    tile_sequence: jax.Array,
    positions: jax.Array,
    *,
    initial_slot: jax.Array | None = None,
    snapshot_slot: jax.Array | None = None,
    stages: int = 0,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """As ops.gated_delta_prefill for 16-bit q, k [N, Hk, 128], v [N, Hv, 128] and a pool of 128 x 128 states.

    Rows without a token give zeros. The tiles of a sequence stand side by side, those without tokens last.

    Args:
      stages: tiles in flight per program; 0: as ``tuning`` chooses.
      interpret: an InterpretGPUParams of Pallas to run on a CPU.
    """
    rows, heads, _ = v.shape
    chosen = choose("gated_delta_prefill", rows, slot.shape[0], heads, HEURISTIC, stages=stages)
    stages = chosen["stages"]
    share = heads // k.shape[1]
    sequences, tiles = describe(slot, tile_sequence, positions, initial_slot, snapshot_slot)
    dtype = q.dtype
    valid = (positions >= 0)[:, None]
    g, beta = (jnp.where(valid, x, 0.0).T for x in (jnp.maximum(g, _LEAST), beta))
    inverse, scores, factors = _solve(q, k, g, beta, tiles, interpret)
    half = TILE  # columns of a state per program: the rows of a product

    def kernel(sequences_ref, tiles_ref, q_ref, k_ref, v_ref, inverse_ref, scores_ref, factors_ref, *rest):
        pool_ref, out_ref, *buffers, loaded = rest[:9]
        staged = rest[9:] or (None,) * 4
        sequence, head = jax.lax.axis_index("sequence"), jax.lax.axis_index("head")
        key_head = jax.lax.div(head, jnp.int32(share))
        own = pl.ds(jax.lax.axis_index("part") * half, half)
        first, count, live = (sequences_ref[i, sequence] for i in range(3))
        source, target = sequences_ref[3, sequence], sequences_ref[4, sequence]

        def rows_of(tile):
            return pl.ds((first + tile) * TILE, TILE)

        def fetch(tile):
            here, buffer = rows_of(tile), jax.lax.rem(tile, jnp.int32(stages))
            sources = (
                q_ref.at[here, key_head],
                k_ref.at[here, key_head],
                v_ref.at[here, head, own],
                inverse_ref.at[here, head],
                scores_ref.at[here, head],
                factors_ref.at[first + tile, head],
            )
            for reference, smem in zip(sources, buffers):
                plgpu.copy_gmem_to_smem(reference, smem.at[buffer], loaded.at[buffer])

        def keep(state, where):
            """Writes the transposed state to a slot of the pool."""
            _store_transposed(pool_ref.at[where, head, :, own], state)

        @pl.when(live > 0)
        def _():
            for tile in range(stages):
                pl.when(tile < live)(functools.partial(fetch, jnp.int32(tile)))
            state = plgpu.load(
                pool_ref.at[jnp.maximum(source, 0), head, :, own].T, layout=_TRANSPOSED, optimized=False
            )
            state = plgpu.layout_cast(state, _WGMMA)
            state = jnp.where(jax.lax.broadcast_in_dim(source, state.shape, ()) >= 0, state, 0.0)

            def step(tile, state):
                buffer = jax.lax.rem(tile, jnp.int32(stages))
                q_tile, k_tile, v_tile, inverse_tile, scores_tile, factors_tile = (
                    x.at[buffer] for x in buffers
                )
                low, high = tiles_ref[0, first + tile], tiles_ref[1, first + tile]
                plgpu.barrier_wait(loaded.at[buffer])

                @pl.when(high - low < TILE)
                def _():
                    x, row = _load(k_tile), _iota(0, SIZE)
                    x = jnp.where((row >= low) & (row < high), x.astype(jnp.float32), 0.0)
                    k_tile[...] = x.astype(dtype)
                    plgpu.commit_smem()

                column = _iota(1)
                held = (column >= low) & (column < high)

                def advance(known, delta, past):
                    narrow = state.astype(dtype)
                    multiply(known, narrow, k_tile.T, staged[0])
                    multiply(past, narrow, q_tile.T, staged[0])
                    values = plgpu.layout_cast(plgpu.load(v_tile.T, layout=_TRANSPOSED), _WGMMA)
                    values = jnp.where(held, values.astype(jnp.float32), 0.0)
                    fade = by_column(factors_tile.at[_KNOWN])
                    error = values - fade * plgpu.wgmma_accumulator_load(known, wait_n=1)
                    multiply(delta, error.astype(_OWN), inverse_tile.T, staged[1])
                    corrections = delta[...]
                    old = past[...] * by_column(factors_tile.at[_OUT])
                    late = corrections * by_column(factors_tile.at[_GAIN])
                    faded = factors_tile[_END, 0] * state

                    def add(new, gain):
                        if staged[0] is None:  # interpretation cannot start a sum from a value
                            new[...], gain[...] = old, faded
                        multiply(new, corrections.astype(_OWN), scores_tile.T, staged[2])
                        multiply(gain, late.astype(dtype), k_tile, staged[3])
                        out = plgpu.wgmma_accumulator_load(new, wait_n=1)
                        out = out if staged[0] is None else old + out
                        _store_transposed(out_ref.at[rows_of(tile), head, own], jnp.where(held, out, 0.0))
                        return gain[...] if staged[0] is None else faded + gain[...]

                    return pl.run_scoped(add, _ACC(_SQUARE), _ACC((half, SIZE)))

                state = pl.run_scoped(advance, *[_ACC(_SQUARE)] * 3)
                plgpu.commit_smem()
                pl.when(tile + stages < live)(lambda: fetch(tile + stages))
                snapshot = tiles_ref[2, first + tile]
                pl.when(snapshot > 0)(lambda: keep(state, snapshot))
                return state

            state = jax.lax.fori_loop(0, live, step, state)
            pl.when(target > 0)(lambda: keep(state, target))

        @pl.when(live < count)
        def _():
            def empty(tile, _):
                zero = plgpu.layout_cast(jnp.zeros(_SQUARE, jnp.float32), _WGMMA)
                _store_transposed(out_ref.at[rows_of(tile), head, own], zero)
                return ()

            jax.lax.fori_loop(live, count, empty, ())

    kernel.__name__ = "gated_delta_prefill"
    narrow = swizzled(128, dtype.itemsize)

    def smem(*shape, dtype=dtype):
        return plgpu.SMEM(shape, dtype, transforms=narrow)

    run = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((rows, heads, SIZE), jnp.float32),
        grid=(slot.shape[0], heads, SIZE // half),
        grid_names=("sequence", "head", "part"),
        scratch_types=[
            smem(stages, TILE, SIZE),
            smem(stages, TILE, SIZE),
            smem(stages, TILE, half),
            smem(stages, *_SQUARE, dtype=_OWN),
            smem(stages, *_SQUARE, dtype=_OWN),
            plgpu.SMEM((stages, _FACTORS, TILE), jnp.float32),
            plgpu.Barrier(num_arrivals=6, num_barriers=stages),
            *([smem(half, SIZE), *[smem(*_SQUARE, dtype=_OWN)] * 2, smem(*_SQUARE)] if interpret else []),
        ],
        compiler_params=_PARAMETERS,
        interpret=interpret,
    )
    pool_ref = jax.new_ref(pool)
    out = run(sequences, tiles, q, k, v, inverse, scores, factors, pool_ref)
    return out, jax.freeze(pool_ref)
