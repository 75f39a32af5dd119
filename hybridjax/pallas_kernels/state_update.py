"""One token of each sequence through a pool of recurrent states [slots, H, 128, 128], updated in place.

Both recurrences of one token read a state once and write it once, so the kernels are bound by those bytes.
A piece of work is some columns of one head's state: columns never meet, neither in the update k d^T nor in
the read q^T S. The bulk copy engine brings pieces to shared memory and takes them back; a program that owns
several fetches the next ones meanwhile.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from hybridjax.ops.dispatch import architecture
from hybridjax.pallas_kernels import tuning as tuning_table

SIZE = 128  # of keys and values
# Of 32 columns a warp has eight, of all rows, so that sums over rows stay within it; its lanes are 16 rows of
# four columns, twice.
_STATE = plgpu.Layout.TILED(plgpu.Tiling(((16, 32), (16, 8), (4,))), (-4,), (-2, -3), -1)
_COLUMNS = _STATE.reduce(0)
ROWS = _STATE.reduce(1)


def swizzled(bytes_per_row: int, itemsize: int) -> tuple:
    """Transforms of a shared-memory array whose rows the copy engine permutes within ``bytes_per_row``."""
    tiling = plgpu.TilingTransform((8, bytes_per_row // itemsize))  # pyright: ignore[reportAbstractUsage]
    return tiling, plgpu.SwizzleTransform(bytes_per_row)  # pyright: ignore[reportAbstractUsage]


# The swizzle of a 128-byte row, without which the threads' reads of a column share a bank.
_SWIZZLED = swizzled(128, 4)


@dataclasses.dataclass(frozen=True)
class Tuning:
    """How a step is divided.

    Attributes:
      columns: of a state per piece, a multiple of 32.
      stages: pieces in flight per program.
      resident: programs per multiprocessor; more than fit run one after the other. None: one per piece.
    """

    columns: int
    stages: int = 1
    resident: int | None = None


def multiprocessors() -> int:
    """Of the GPU that a program traced now will run on; that of an H200 where there is none."""
    device = jax.config.jax_default_device or jax.devices()[0]  # pyright: ignore[reportAttributeAccessIssue]
    return getattr(device, "core_count", None) or 132


def heuristic(states: int, processors: int) -> Tuning:
    """A piece per program; few states are cut finer, so that all multiprocessors have some."""
    return Tuning(columns=32 if states <= 2 * processors else 64)


def choose(op: str, rows: int, heads: int, processors: int, override: Tuning | None = None) -> Tuning:
    """How ``op`` divides the states of some rows: see ``tuning.choose``."""
    found = tuning_table.choose(
        op,
        architecture(),
        processors,
        {"states": rows * heads},
        heuristic=lambda: dataclasses.asdict(heuristic(rows * heads, processors)),
        override=dataclasses.asdict(override) if override else None,
    )
    return Tuning(**found.options)  # pyright: ignore[reportArgumentType]


def load_key(ref) -> jax.Array:
    """float32[128] from global memory, one element per row of the state."""
    return plgpu.load(ref, layout=ROWS, optimized=False).astype(jnp.float32)


def load_value(ref) -> jax.Array:
    """float32[columns] from global memory, one element per column of the state."""
    return plgpu.load(ref, layout=_COLUMNS, optimized=False).astype(jnp.float32)


def by_row(x: jax.Array, columns: int) -> jax.Array:
    """float32[128] spread over the columns."""
    return jax.lax.broadcast_in_dim(x, (SIZE, columns), (0,))


def by_column(x: jax.Array, columns: int) -> jax.Array:
    """float32[columns] spread over the rows."""
    return jax.lax.broadcast_in_dim(x, (SIZE, columns), (1,))


def update(
    name: str,
    load: Callable[..., Any],
    advance: Callable[..., tuple[jax.Array, jax.Array]],
    operands: tuple[jax.Array, ...],
    pool: jax.Array,
    slot: jax.Array,
    positions: jax.Array,
    *,
    tuning: Tuning,
    multiprocessors: int,
    prepare: Callable[[Any], Any] | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Runs one token of B sequences; a state is read and written exactly once.

    Rows with position -1 give zeros and touch no state, rows with position 0 start from a zero state.

    Args:
      name: of the kernel in profiles.
      load: called as ``load(refs, row, head, columns)``: what ``advance`` needs of these.
      prepare: what is to be made of it first, while the state is on its way; ``load`` then only reads.
      advance: called as ``advance(loaded, state float32[128, columns])``: float32[columns] and the new state.
      operands: arrays whose references ``load`` gets.
      pool: float32[slots, H, 128, 128]; slot, positions: int32[B], slots of live rows are distinct.
      tuning: see there; multiprocessors: of the GPU.
      interpret: an InterpretGPUParams of Pallas to run on a CPU.

    Returns:
      outputs float32[B, H, 128] and the pool.
    """
    columns, stages, resident = tuning.columns, tuning.stages, tuning.resident
    rows, heads, parts = slot.shape[0], pool.shape[1], SIZE // columns
    total = rows * heads * parts
    programs = total if resident is None else min(total, multiprocessors * resident)
    steps = -(-total // programs)
    stages = min(stages, steps)

    def kernel(slot_ref, positions_ref, *refs):
        *operand_refs, pool_ref, out_ref, smem, barriers = refs
        program = jax.lax.axis_index("program")

        def piece(step):
            """Row, head, columns and buffer of a step, and whether it is one of ours and a live row."""
            index = step * programs + program
            ours = index < total
            index = jnp.where(ours, index, 0)
            row = jax.lax.div(index, jnp.int32(heads * parts))
            head = jax.lax.rem(jax.lax.div(index, jnp.int32(parts)), jnp.int32(heads))
            own = pl.ds(jax.lax.rem(index, jnp.int32(parts)) * columns, columns)
            return row, head, own, jax.lax.rem(step, jnp.int32(stages)), ours

        def fetch(step):
            row, head, own, buffer, ours = piece(step)
            # Asked for together: one answer after the other would take twice as long.
            position, slot = positions_ref[row], slot_ref[row]

            @pl.when(ours & (jnp.minimum(position, slot) >= 0))
            def _():
                source = pool_ref.at[slot, head, :, own]
                plgpu.copy_gmem_to_smem(source, smem.at[buffer], barriers.at[buffer])

        # What is only read may be asked for before the state, whose slot is still on its way.
        early = prepare is not None and steps == 1
        asked = load(operand_refs, *piece(jnp.int32(0))[:3]) if early else None
        for step in range(stages if stages == steps else stages - 1):
            fetch(jnp.int32(step))

        def body(step, _):
            row, head, own, buffer, ours = piece(step)
            position, slot = positions_ref[row], slot_ref[row]
            live = ours & (jnp.minimum(position, slot) >= 0)

            @pl.when(live)
            def _():
                loaded = asked if early else load(operand_refs, row, head, own)
                loaded = loaded if prepare is None else prepare(loaded)
                plgpu.barrier_wait(barriers.at[buffer])
                state = plgpu.load(smem.at[buffer], layout=_STATE, optimized=False)
                # A select: whatever the slot of a fresh sequence holds, also NaN, must not show.
                fresh = jax.lax.broadcast_in_dim(position, state.shape, ()) == 0
                state = jnp.where(fresh, 0.0, state)
                out, state = advance(loaded, state)
                smem[buffer] = state
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(smem.at[buffer], pool_ref.at[slot, head, :, own])
                out_ref[row, head, own] = out

            @pl.when(jnp.logical_not(live))
            def _():
                plgpu.commit_smem_to_gmem_group()  # so that the waits below count steps

            @pl.when(ours & jnp.logical_not(live))
            def _():
                out_ref[row, head, own] = plgpu.layout_cast(jnp.zeros((columns,), jnp.float32), _COLUMNS)

            if stages < steps:
                # The buffer of the step before is free once its copy has been read.
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                fetch(step + stages - 1)
            return ()

        if steps == 1:
            body(jnp.int32(0), ())
        else:
            jax.lax.fori_loop(0, steps, body, ())
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    kernel.__name__ = name
    run = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((rows, heads, SIZE), jnp.float32),
        grid=(programs,),
        grid_names=("program",),
        scratch_types=[
            plgpu.SMEM((stages, SIZE, columns), jnp.float32, transforms=_SWIZZLED),
            plgpu.Barrier(num_barriers=stages),
        ],
        # A thread reads of a piece what it writes, and the copy engine waits for a commit_smem.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        interpret=interpret,
    )
    pool_ref = jax.new_ref(pool)
    out = run(slot, positions, *operands, pool_ref)
    return out, jax.freeze(pool_ref)
