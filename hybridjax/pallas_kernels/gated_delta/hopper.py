"""The gated delta rule over the tiles of a ragged batch on Hopper GPUs; see ops.gated_delta.

Within a tile the corrections d solve a triangular system. With the decays ``fade`` from the tile's start and
``rest`` to its end:

    d = inverse (v - fade (k S)),   o = fade (q S) + scores d,   S <- fade_end S + k^T (rest d)

One kernel solves it for all tiles, as an inverse; the other carries the state through a sequence's tiles, one
program per sequence, value head and 64 columns of the state.

The second kernel computes everything transposed: the state is then the left operand of its products and
stays in registers from tile to tile, and so do the corrections; shared memory holds what the first kernel
and the model wrote, nothing that one product hands to the next. A second warpgroup fetches the tiles. The
norms of q and k are factors of rows of products, so that no normalised copy is made. Sums are float32; q,
k, the state where it is read and what is added to it have the inputs' dtype in products, everything between
the two kernels float16, which has three more bits for numbers that are about one (corrections beyond 65504
would overflow).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from hybridjax.batch import TILE
from hybridjax.pallas_kernels.gated_delta.warps import eliminate, lower, store_transposed
from hybridjax.pallas_kernels.state_update import SIZE, multiprocessors, swizzled
from hybridjax.pallas_kernels.tiles import choose, describe

HEURISTIC = {"stages": 3}
_NORM_EPS = 1e-6
_LEAST = -100.0  # a smaller logarithm of a decay is zero in float32 too, and sums of it would lose digits
_LOG2E = 1.4426950408889634
_WGMMA = plgpu.Layout.WGMMA
_TRANSPOSED = plgpu.Layout.WGMMA_TRANSPOSED
_ACC = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]
_SQUARE = (TILE, TILE)
_OWN = jnp.float16  # of what the two kernels compute between them: elements of about one
# What one warp leaves to another lies before a commit_smem, which is a barrier of a warpgroup, or before an
# arrival at a Barrier, which all its threads make.
_PARAMETERS = plgpu.CompilerParams(unsafe_no_auto_barriers=True, approx_math=True)
# Rows of the factors of a tile and head, and of what the threads that solve it tell each other.
_KNOWN, _OUT, _GAIN, _END, _FACTORS = range(5)
_KEY, _SUM, _TOLD = range(3)


def _load(ref) -> jax.Array:
    return plgpu.load(ref, layout=_WGMMA)


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


def _zeros(shape: tuple[int, int]) -> jax.Array:
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), _WGMMA)


def _iota(axis: int, columns: int = TILE) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, (TILE, columns), axis, layout=_WGMMA)


def _clean(ref, low, high) -> None:
    """Zeros in the rows of a tile that hold no token: they may be NaN, which times zero is NaN."""
    x = _load(ref).astype(jnp.float32)
    row = _iota(0, x.shape[1])
    ref[...] = jnp.where((row >= low) & (row < high), x, 0.0).astype(ref.dtype)


def _squares(tile) -> jax.Array:
    """float32[64]: of a tile's rows, and a little that keeps their norms from zero."""
    x = _load(tile).astype(jnp.float32)
    return jnp.sum(x * x, axis=1) + _NORM_EPS


def _solve(q, k, gates, tiles, interpret):
    """What each tile and value head needs beyond the state.

    Args:
      q, k: [N, Hk, 128]; gates: float32[2, Hv, N], logarithms (to base two) of decays and beta, zero in rows
        without a token; tiles: of ``describe``.

    Returns:
      inverse and scores, float16[N, Hv, 64]: (I + A)^-1 diag(beta) with A the strictly lower part of
      beta_i (k_i k_j) decay_ij, and the lower part of (q_i k_j) decay_ij, of normalised q and k; and the
      factors float32[N / 64, Hv, 4, 64]. All undefined in tiles without tokens.
    """
    rows, heads = q.shape[0], gates.shape[1]
    share = heads // q.shape[1]
    dtype = q.dtype
    # Heads that share a key head share a block: three leave 168 registers to a thread, enough without spills.
    threads = next(n for n in (3, 2, 1) if share % n == 0)
    groups = heads // threads
    total = rows // TILE * groups
    programs = min(total, multiprocessors())

    def gated_delta_solve(tiles_ref, q_ref, k_ref, gates_ref, inverse_ref, scores_ref, factors_ref, *scratch):
        # Of a buffer. Loaded: a tile is there. Clean: a partial one, too. Free: no warpgroup needs it now.
        q_smem, k_smem, gates_smem, *mine, loaded, free, clean = scratch
        program, thread = jax.lax.axis_index("program"), jax.lax.axis_index("thread")

        def piece(step):
            """Tile, first head and buffer of a step."""
            index = step * programs + program
            return jax.lax.div(index, groups), jax.lax.rem(index, groups) * threads, step & 1

        def rows_held(step):
            tile = jnp.minimum(piece(step)[0], rows // TILE - 1)
            return tiles_ref[0, tile], tiles_ref[1, tile]

        def fetch(step):
            tile, head, buffer = piece(step)
            here, key_head = pl.ds(tile * TILE, TILE), jax.lax.div(head, jnp.int32(share))
            plgpu.copy_gmem_to_smem(q_ref.at[here, key_head], q_smem.at[buffer], loaded.at[buffer])
            plgpu.copy_gmem_to_smem(k_ref.at[here, key_head], k_smem.at[buffer], loaded.at[buffer])
            source = gates_ref.at[:, pl.ds(head, threads), here]
            plgpu.copy_gmem_to_smem(source, gates_smem.at[buffer], loaded.at[buffer])

        pl.when(thread == 0)(lambda: fetch(jnp.int32(0)))

        def step(step, carry):
            tile, head, buffer = piece(step)
            head += thread
            here = pl.ds(tile * TILE, TILE)
            low, high = carry
            following = rows_held(step + 1)  # asked for a step ahead: the answer takes its time
            # Zeros, which the compiler cannot know: addresses kept over the loop and masks kept from one use
            # to the next would not fit.
            zero, other = jnp.minimum(low, 0), jnp.minimum(high, 0)
            inverse, rest, near_smem, factors, told, *staged = (x.at[thread + zero] for x in mine)
            staged = staged[0] if staged else None
            more = (step + 2) * programs + program < total

            @pl.when((thread == 0) & ((step + 1) * programs + program < total))
            def _():
                pl.when(step > 0)(lambda: plgpu.barrier_wait(free.at[1 - buffer]))
                fetch(step + 1)

            plgpu.barrier_wait(loaded.at[buffer])

            @pl.when(low < high)
            def _():
                q_tile, k_tile = q_smem.at[buffer], k_smem.at[buffer]

                @pl.when(high - low < TILE)
                def _():
                    @pl.when(thread == 0)
                    def _():
                        for ref in (q_tile, k_tile):
                            _clean(ref, low, high)
                        plgpu.commit_smem()
                        plgpu.barrier_arrive(clean.at[buffer])

                    plgpu.barrier_wait(clean.at[buffer])

                def products(alike, against):
                    plgpu.wgmma(alike, k_tile, k_tile.T)
                    plgpu.wgmma(against, q_tile, k_tile.T)
                    sums = jnp.sum(
                        lower(by_column(gates_smem.at[buffer, 0, thread]), zero, interpret), axis=1
                    )
                    squares = _squares(k_tile)
                    key_scale = jax.lax.rsqrt(squares)
                    query_scale = SIZE**-0.5 * jax.lax.rsqrt(_squares(q_tile))
                    rate = -by_row(gates_smem.at[buffer, 1, thread]) * key_scale
                    told[_KEY] = -0.5 * _LOG2E * jnp.log(squares) - sums
                    told[_SUM] = sums
                    plgpu.commit_smem()
                    # Of the norm of a key as well. Above the diagonal it may be infinite.
                    decay = jnp.exp2(spread(sums, TILE) + by_column(told.at[_KEY]))
                    decay = lower(decay, other, interpret)
                    alike, against = plgpu.wgmma_accumulator_load(alike, wait_n=1), against[...]
                    system = (alike * decay * spread(rate, TILE)).astype(_OWN)
                    near = (against * decay * spread(query_scale, TILE)).astype(_OWN)
                    return system, near, sums, key_scale, query_scale

                found = pl.run_scoped(products, _ACC(_SQUARE), _ACC(_SQUARE))
                system, near, sums, key_scale, query_scale = found
                beta = plgpu.load(gates_smem.at[buffer, 1, thread], layout=_WGMMA.reduce(0), optimized=False)
                far, far_and_one, blocks = eliminate(system, beta, zero, interpret)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                inverse[...] = far
                rest[...] = blocks
                near_smem[...] = near
                total_sum, fade = told[_SUM, TILE - 1], jnp.exp2(sums)
                factors[_KNOWN] = fade * key_scale
                factors[_OUT] = fade * query_scale
                factors[_GAIN] = jnp.exp2(total_sum - sums) * key_scale
                factors[_END] = jnp.exp2(total_sum + 0.0 * sums)
                plgpu.commit_smem()
                pl.when(more)(lambda: plgpu.barrier_arrive(free.at[buffer]))

                def merge(once, twice, *apart):
                    multiply(twice, far, inverse, staged)
                    multiply(once, far_and_one, rest, staged)
                    square = plgpu.wgmma_accumulator_load(twice, wait_n=1).astype(_OWN)
                    x = once[...]
                    rest[...] = x.astype(_OWN)
                    plgpu.commit_smem()
                    if apart:  # interpretation cannot add to a sum that was read
                        multiply(apart[0], square, rest, staged)
                        return x + apart[0][...]
                    plgpu.wgmma(once, square, rest)
                    return once[...]

                sums = [_ACC(_SQUARE)] * (3 if interpret else 2)
                inverse[...] = pl.run_scoped(merge, *sums).astype(_OWN)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(near_smem, scores_ref.at[here, head])
                plgpu.copy_smem_to_gmem(inverse, inverse_ref.at[here, head])
                plgpu.copy_smem_to_gmem(factors, factors_ref.at[tile, head])

            pl.when(more & (low >= high))(lambda: plgpu.barrier_arrive(free.at[buffer]))
            return following

        steps = jax.lax.div(total - 1 - program, jnp.int32(programs)) + 1
        jax.lax.fori_loop(0, steps, step, rows_held(0))
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
            *[plgpu.SMEM((2, TILE, SIZE), dtype, transforms=narrow)] * 2,
            plgpu.SMEM((2, 2, threads, TILE), jnp.float32),
            *[square] * 3,
            plgpu.SMEM((threads, _FACTORS, TILE), jnp.float32),
            plgpu.SMEM((threads, _TOLD, TILE), jnp.float32),
            *([square] if interpret else []),
            plgpu.Barrier(num_arrivals=3, num_barriers=2),
            plgpu.Barrier(num_arrivals=threads, num_barriers=2),
            plgpu.Barrier(num_barriers=2),
        ],
        compiler_params=_PARAMETERS,
        interpret=interpret,
    )(tiles, q, k, gates)


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
      stages: tiles in flight per program, two at least; 0: as ``tuning`` chooses.
      interpret: an InterpretGPUParams of Pallas to run on a CPU.

    Raises:
      ValueError: stages is one.
    """
    rows, heads, _ = v.shape
    chosen = choose("gated_delta_prefill", rows, slot.shape[0], heads, HEURISTIC, stages=stages)
    stages = chosen["stages"]
    if stages < 2:
        raise ValueError(
            "gated_delta_prefill: a tile is fetched while another is used; stages must be 2 or more"
        )
    share = heads // k.shape[1]
    sequences, tiles = describe(slot, tile_sequence, positions, initial_slot, snapshot_slot)
    dtype = q.dtype
    valid = (positions >= 0)[:, None]
    gates = jnp.stack([jnp.where(valid, x, 0.0).T for x in (_LOG2E * jnp.maximum(g, _LEAST), beta)])
    inverse, scores, factors = _solve(q, k, gates, tiles, interpret)
    half = TILE  # columns of a state per program: the rows of a product

    def kernel(sequences_ref, tiles_ref, q_ref, k_ref, v_ref, inverse_ref, scores_ref, factors_ref, *rest):
        # Of a buffer. Loaded: a tile is there. Ready: and clean. Used: it is needed no more.
        pool_ref, out_ref, *buffers, loaded, ready, used = rest[:11]
        staged = rest[11:] or (None,) * 4
        sequence, head = jax.lax.axis_index("sequence"), jax.lax.axis_index("head")
        thread, key_head = jax.lax.axis_index("thread"), jax.lax.div(head, jnp.int32(share))
        own = pl.ds(jax.lax.axis_index("part") * half, half)
        first, count, live = (sequences_ref[i, sequence] for i in range(3))

        def rows_of(tile):
            return pl.ds((first + tile) * TILE, TILE)

        def about(tile, *which):
            """First row with a token, the row behind the last, and the snapshot slot of a tile."""
            index = first + jnp.minimum(tile, live - 1)
            return tuple(tiles_ref[i, index] for i in which)

        def buffer_of(tile):
            return jax.lax.rem(tile, jnp.int32(stages))

        def put(tile, out):
            store_transposed(out_ref.at[rows_of(tile), head, own], out, interpret)

        def bring():
            def fetch(tile):
                here, buffer = rows_of(tile), buffer_of(tile)
                sources = (
                    q_ref.at[here, key_head],
                    k_ref.at[here, key_head],
                    v_ref.at[here, head, own],
                    inverse_ref.at[here, head],
                    scores_ref.at[here, head],
                    factors_ref.at[first + tile, head],
                )
                for source, smem in zip(sources, buffers, strict=True):
                    plgpu.copy_gmem_to_smem(source, smem.at[buffer], loaded.at[buffer])

            for tile in range(stages):
                pl.when(tile < live)(functools.partial(fetch, jnp.int32(tile)))

            def step(tile, carry):
                low, high = carry
                following = about(tile + 1, 0, 1)  # asked for a tile ahead: the answer takes its time
                buffer = buffer_of(tile)
                plgpu.barrier_wait(loaded.at[buffer])

                @pl.when(high - low < TILE)
                def _():
                    for smem in buffers[:3]:
                        _clean(smem.at[buffer], low, high)
                    plgpu.commit_smem()

                plgpu.barrier_arrive(ready.at[buffer])
                ahead = tile + stages - 1

                @pl.when((tile > 0) & (ahead < live))
                def _():
                    plgpu.barrier_wait(used.at[buffer_of(ahead)])
                    fetch(ahead)

                return following

            @pl.when(live > 0)
            def _():
                jax.lax.fori_loop(0, live, step, about(0, 0, 1))

            @pl.when(live < count)
            def _():
                def empty(tile, _):
                    put(tile, _zeros(_SQUARE))
                    return ()

                jax.lax.fori_loop(live, count, empty, ())

        def carry_state():
            source, target = sequences_ref[3, sequence], sequences_ref[4, sequence]

            def keep(state, where):
                """Writes the transposed state to a slot of the pool."""
                pool_ref.at[where, head, :, own].T[...] = plgpu.layout_cast(state, _TRANSPOSED)

            def stored():
                state = plgpu.load(pool_ref.at[source, head, :, own].T, layout=_TRANSPOSED, optimized=False)
                return plgpu.layout_cast(state, _WGMMA)

            # A load would wait behind all the tiles that were asked for.
            state = jax.lax.cond(source >= 0, stored, lambda: _zeros((half, SIZE)))

            def step(tile, carry):
                state, snapshot = carry
                (following,) = about(tile + 1, 2)
                buffer = buffer_of(tile)
                q_tile, k_tile, v_tile, inverse, scores, factors = (x.at[buffer] for x in buffers)
                plgpu.barrier_wait(ready.at[buffer])

                def advance(known, delta, past):
                    narrow = state.astype(dtype)
                    multiply(known, narrow, k_tile.T, staged[0])
                    multiply(past, narrow, q_tile.T, staged[0])
                    values = _load(v_tile.T).astype(jnp.float32)
                    fade = by_column(factors.at[_KNOWN])
                    error = values - fade * plgpu.wgmma_accumulator_load(known, wait_n=1)
                    multiply(delta, error.astype(_OWN), inverse.T, staged[1])
                    faded = factors[_END, 0] * state
                    # While that product runs; it is the last one.
                    old = plgpu.wgmma_accumulator_load(past, wait_n=1) * by_column(factors.at[_OUT])
                    corrections = delta[...]
                    late = corrections * by_column(factors.at[_GAIN])

                    def add(new, gain):
                        if staged[0] is None:  # interpretation cannot start a sum from a value
                            new[...], gain[...] = old, faded
                        multiply(new, corrections.astype(_OWN), scores.T, staged[2])
                        multiply(gain, late.astype(dtype), k_tile, staged[3])
                        plgpu.commit_smem()  # before the stores: behind them it takes longer
                        out = plgpu.wgmma_accumulator_load(new, wait_n=1)
                        put(tile, out if staged[0] is None else old + out)
                        return gain[...] if staged[0] is None else faded + gain[...]

                    return pl.run_scoped(add, _ACC(_SQUARE), _ACC((half, SIZE)))

                state = pl.run_scoped(advance, *[_ACC(_SQUARE)] * 3)
                pl.when(tile + stages < live)(lambda: plgpu.barrier_arrive(used.at[buffer]))
                pl.when(snapshot > 0)(lambda: keep(state, snapshot))
                return state, following

            state, _ = jax.lax.fori_loop(0, live, step, (state, *about(0, 2)))
            pl.when(target > 0)(lambda: keep(state, target))

        pl.when((thread == 0) & (live > 0))(carry_state)
        pl.when(thread == 1)(bring)

    kernel.__name__ = "gated_delta_prefill"
    narrow = swizzled(128, dtype.itemsize)

    def smem(*shape, dtype=dtype):
        return plgpu.SMEM(shape, dtype, transforms=narrow)

    run = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((rows, heads, SIZE), jnp.float32),
        grid=(slot.shape[0], heads, SIZE // half),
        grid_names=("sequence", "head", "part"),
        num_threads=2,
        thread_name="thread",
        scratch_types=[
            *[smem(stages, TILE, SIZE)] * 2,
            smem(stages, TILE, half),
            *[smem(stages, *_SQUARE, dtype=_OWN)] * 2,
            plgpu.SMEM((stages, _FACTORS, TILE), jnp.float32),
            plgpu.Barrier(num_arrivals=6, num_barriers=stages),
            *[plgpu.Barrier(num_barriers=stages)] * 2,
            *([smem(half, SIZE), *[smem(*_SQUARE, dtype=_OWN)] * 2, smem(*_SQUARE)] if interpret else []),
        ],
        compiler_params=_PARAMETERS,
        interpret=interpret,
    )
    pool_ref = jax.new_ref(pool)
    out = run(sequences, tiles, q, k, v, inverse, scores, factors, pool_ref)
    return out, jax.freeze(pool_ref)
