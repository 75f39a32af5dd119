"""What Gated DeltaNet does to the tokens of a prompt before its recurrence; ops.gated_delta_inputs.

The bulk copy engine brings a tile of 64 tokens and two heads with the three tokens before it, and takes the
result back from the same place: a thread owns two channels, so that the taps are a window that slides down
its registers, and nothing of a tile is read twice. Keys and queries are not normalised here: the recurrence
has their norms as factors of rows.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from hybridjax.batch import TILE, Batch
from hybridjax.ops.history import bounds, rows_before
from hybridjax.ops.mixers import gates
from hybridjax.pallas_kernels.pointwise.values import sigmoid
from hybridjax.pallas_kernels.state_update import SIZE
from hybridjax.pallas_kernels.tiles import spans

TAPS = 4
_PAST = TAPS - 1
_WIDTH = 2 * SIZE  # channels of a program
_CHANNELS = plgpu.Layout.WG_STRIDED((_WIDTH,), vec_size=2)
# A thread reads what the copy engine brought and what it wrote itself: no barriers between rows. Results are
# rounded to 16 bits: exponentials and roots may err in the last bits of float32.
_PARAMETERS = plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True)


def describe(batch: Batch) -> jax.Array:
    """int32[6, T], what the kernel must know of the tiles of a PREFILL.

    Column of the first token and the column behind the last one (0: no tokens), the sequence, how many of the
    last three rows of the tile before are tokens of it (-1: it begins here), the slot to keep the last inputs
    in if they end here (0: none), and the slot of the snapshot (0: none).
    """
    tiles, sequence = batch.positions.reshape(-1, TILE), batch.tile_sequence
    low, end, snapshot = spans(batch.positions, batch.snapshot_slot)
    full = tiles[:-1, -1] >= 0
    follows = (sequence[1:] == sequence[:-1]) & full & (tiles[1:, 0] == tiles[:-1, -1] + 1)
    none = jnp.zeros((1,), bool)
    known = jnp.concatenate([jnp.zeros((1,), jnp.int32), jnp.minimum(end[:-1] - low[:-1], _PAST)])
    ends = ~jnp.concatenate([follows, none]) & (end > 0)
    return jnp.stack(
        [
            low,
            end,
            sequence,
            jnp.where(jnp.concatenate([none, follows]), known, -1),
            jnp.where(ends, batch.slot[sequence], 0),
            snapshot,
        ]
    )


@functools.partial(jax.jit, static_argnames=("key_heads", "key_size", "value_size", "together", "interpret"))
def gated_delta_inputs(
    projected: jax.Array,
    conv_weight: jax.Array,
    A_log: jax.Array,
    dt_bias: jax.Array,
    batch: Batch,
    pool: jax.Array,
    *,
    key_heads: int,
    key_size: int,
    value_size: int,
    together: int = 8,
    interpret: Any = None,
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """As ops.gated_delta_inputs of a PREFILL for an even number of heads of 128, four taps and 16-bit rows.

    Tiles without tokens are not written, other rows with position -1 are meaningless.

    Args:
      together: rows that are loaded before the first of them is computed with.
    """
    assert key_size == value_size == SIZE
    rows, heads, dtype = projected.shape[0], A_log.shape[0], projected.dtype
    pieces = [n * SIZE // _WIDTH for n in (key_heads, key_heads, heads)]
    before = rows_before(batch, pool, bounds(batch)[0])

    def kernel(tiles_ref, projected_ref, weight_ref, before_ref, pool_ref, *rest):
        *results, smem, loaded = rest
        tile, piece = jax.lax.axis_index("tile"), jax.lax.axis_index("piece")
        low, end, sequence, known, own, snapshot = (tiles_ref[i, tile] for i in range(6))
        here, columns = tile * TILE, pl.ds(piece * _WIDTH, _WIDTH)

        def read(ref):
            return plgpu.load(ref, layout=_CHANNELS, optimized=False)

        @pl.when(end > 0)
        def _():
            # Row r of the tile lies at _PAST + r.
            @pl.when(known >= 0)
            def _():
                source = projected_ref.at[pl.ds(here - _PAST, _PAST + TILE), columns]
                plgpu.copy_gmem_to_smem(source, smem, loaded)

            @pl.when(known < 0)
            def _():
                source = projected_ref.at[pl.ds(here, TILE), columns]
                plgpu.copy_gmem_to_smem(source, smem.at[pl.ds(_PAST, TILE)], loaded)

            weights = [read(weight_ref.at[j, columns]).astype(jnp.float32) for j in range(TAPS)]
            plgpu.barrier_wait(loaded)

            @pl.when(known < 0)
            def _():
                for j in range(_PAST):
                    smem[low + j] = read(before_ref.at[sequence, j, columns])

            for few in range(1, _PAST):

                @pl.when(known == few)
                def _(few=few):
                    for j in range(_PAST - few):
                        smem[j] = read(before_ref.at[sequence, few + j, columns])

            for slot in (own, snapshot):

                @pl.when(slot > 0)
                def _(slot=slot):
                    for j in range(_PAST):
                        pool_ref[slot, j, columns] = read(smem.at[end + j])

            def advance(i, past):
                first = _PAST + i * together
                window = [*past, *(read(smem.at[first + r]).astype(jnp.float32) for r in range(together))]
                for r in range(together):
                    x = window[r] * weights[0]
                    for j in range(1, TAPS):
                        x = x + window[r + j] * weights[j]
                    smem[first + r] = (x * sigmoid(x)).astype(dtype)
                return tuple(window[together:])

            past = tuple(read(smem.at[j]).astype(jnp.float32) for j in range(_PAST))
            jax.lax.fori_loop(0, TILE // together, advance, past)
            plgpu.commit_smem()
            start = 0
            for number, ref in zip(pieces, results):

                @pl.when((piece >= start) & (piece < start + number))
                def _(start=start, ref=ref):
                    target = ref.at[pl.ds(here, TILE), pl.ds((piece - start) * _WIDTH, _WIDTH)]
                    plgpu.copy_smem_to_gmem(smem.at[pl.ds(_PAST, TILE)], target)

                start += number
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    kernel.__name__ = "gated_delta_inputs"
    pool_ref = jax.new_ref(pool)
    found = plgpu.kernel(
        kernel,
        out_type=[jax.ShapeDtypeStruct((rows, number * _WIDTH), dtype) for number in pieces],
        grid=(rows // TILE, sum(pieces)),
        grid_names=("tile", "piece"),
        scratch_types=[plgpu.SMEM((_PAST + TILE, _WIDTH), dtype), plgpu.Barrier()],
        compiler_params=_PARAMETERS,
        interpret=interpret,
    )(describe(batch), projected, conv_weight[:, 0].T, before, pool_ref)
    q, k, v = (x.reshape(rows, -1, SIZE) for x in found)
    return (q, k, v, *gates(projected, A_log, dt_bias)), jax.freeze(pool_ref)
