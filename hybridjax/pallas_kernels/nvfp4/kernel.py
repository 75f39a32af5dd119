"""x W^T with NVFP4 weights in the checkpoint's layout, for up to 64 tokens at a time, dense and grouped.

A program multiplies 64 or 128 rows of a matrix, or some of their columns, 16 rows of each 64 per warp. The
copy engine fills a ring of stages in shared memory: 256 columns of codes and scales, and x there. From them a
warp decodes weights into registers and multiplies, ``fragment`` says how; nothing it decodes goes through
memory. Matrices of up to 1024 columns that are no multiple of 256 are one stage of whole rows: rows of their
scales start where the copy engine cannot.

**What bounds it.** By the machine code for sm_90a, up to 8 tokens and 128 rows, a lane spends 587
instructions in a stage on 256 values, 267 of them on the integer pipe, which takes 64 lanes per clock: 61
values per clock and multiprocessor, 9 us for 4096 x 32768 at 1.85 GHz, where the bytes take 17.6 us at 4.3
TB/s. 16 tokens add 32 tensor-core instructions and 14 others. Measured: 22.3 us for 1 token, 23.9 for 16; a
kernel that only copies takes 19.8.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from hybridjax.ops.dispatch import architecture
from hybridjax.ops.nvfp4 import BLOCK_ROWS, divides
from hybridjax.pallas_kernels.nvfp4 import emit
from hybridjax.pallas_kernels.nvfp4.fragment import CHUNK, ROWS, TOKENS, Stage
from hybridjax.pallas_kernels.state_update import multiprocessors, swizzled
from hybridjax.pallas_kernels.tuning import Options, choose
from hybridjax.quantization import GROUP, decode

COLUMNS = 256  # of a tiled stage: rows of 128 bytes
_FEW = 16  # tokens up to which codes are the larger part of a stage
_STAGES = 4
_LARGE = 8  # stages of 128 rows per multiprocessor
_THREADS = 128  # of a program
_SUMS = plgpu.Layout.MMA_ACC(jnp.bfloat16)
_SWIZZLED_LINES = (plgpu.SwizzleTransform(128),)  # pyright: ignore[reportAbstractUsage]


@dataclasses.dataclass(frozen=True)
class Tuning:
    """How a product is divided.

    Attributes:
      rows: of the weights per program, 64 or 128.
      splits: programs that share the columns of a row; their sums are added afterwards.
      stages: of 256 columns in shared memory per program.
    """

    rows: int
    splits: int
    stages: int


def may_activate(columns: int) -> bool:
    """Whether the activation of one token's hidden values fits into the product that they go into."""
    return columns % COLUMNS != 0 and columns % 128 == 0


def shared_memory() -> int:
    """Bytes of a multiprocessor that its programs may share."""
    return 98 * 1024 if architecture() in ("sm_120", "sm_121") else 220 * 1024


def _stage_bytes(rows: int, tokens: int) -> int:
    room = 1 if tokens == 1 else -(-tokens // TOKENS) * TOKENS
    return rows * (COLUMNS // 2 + COLUMNS // 16) + room * COLUMNS * 2


def default_tuning(tokens: int, columns: int, features: int, blocks: int, processors: int) -> Tuning:
    """What ``tunings`` says of such a product on this GPU, else about four programs per multiprocessor.

    Programs of 128 rows read x once for both halves: for all large products, and where x is the larger part
    of a stage; of these, two are enough.
    """
    if columns % COLUMNS:
        return Tuning(ROWS, 1, 1)
    shape = {"tokens": tokens, "columns": columns, "features": features, "blocks": blocks}

    def by_rule() -> Options:
        return dataclasses.asdict(_rule(tokens, columns, features, blocks, processors))

    chosen = choose("nvfp4_product", architecture(), processors, shape, heuristic=by_rule)
    return Tuning(**chosen.options)  # pyright: ignore[reportArgumentType]


def _rule(tokens: int, columns: int, features: int, blocks: int, processors: int) -> Tuning:
    rows, resident, steps = ROWS, 4, columns // COLUMNS
    if features % (2 * ROWS) == 0 and 2 * _stage_bytes(2 * ROWS, tokens) <= shared_memory():
        large = features // (2 * ROWS) * steps * blocks >= _LARGE * processors
        if tokens > _FEW:
            rows, resident = 2 * ROWS, 2
        elif large:
            rows = 2 * ROWS
    programs = features // rows * blocks
    wanted = min(resident * processors // programs, steps // 2)
    splits = max([n for n in range(1, wanted + 1) if steps % n == 0], default=1)
    stages = shared_memory() // resident // _stage_bytes(rows, tokens)
    return Tuning(rows, splits, max(2, min(_STAGES, stages)))


def product(
    x: jax.Array,
    codes: jax.Array,
    scales: jax.Array,
    global_scale: jax.Array,
    expert: jax.Array | None = None,
    active: jax.Array | None = None,
    *,
    tokens: int,
    share: int,
    out_dtype: Any,
    swiglu: bool = False,
    tuning: Tuning | None = None,
    interpret: Any = None,
) -> jax.Array:
    """Blocks of tokens, each times the matrix of one expert.

    Args:
      x: bfloat16[rows, K].
      codes: uint32[E, N, K / 8], see ``quantization.words``; scales: float8_e4m3fn[E, N, K / 16];
        global_scale: float32[E, N].
      expert: int32[blocks], -1 for a block that is not wanted; None: all blocks are of expert 0.
      active: int32[1]; blocks from here on are not wanted either. None: there are none.
      tokens: per block, up to 64.
      share: how many consecutive blocks multiply the same tokens: block b has rows b // share * tokens on.
      out_dtype: of the result where nothing is left to be summed; float32 otherwise.
      swiglu: x is float32[parts, blocks, 2 K] instead, whose sum over the parts is a gate and what it gates;
        for one token per block where ``may_activate``.
      tuning: None for the default.
      interpret: an InterpretGPUParams of Pallas to run on a CPU.

    Returns:
      [splits, blocks * tokens, N] to be summed over the splits; rows of other blocks are undefined.

    Raises:
      ValueError: sizes that are not whole tiles, or codes in the order of a checkpoint.
    """
    columns, features = scales.shape[2] * GROUP, codes.shape[1]
    if codes.dtype != jnp.uint32:
        raise ValueError(
            f"codes are {codes.dtype}, as in a checkpoint; use quantization.to_words on them once"
        )
    if tokens > BLOCK_ROWS or not divides(features, columns):
        raise ValueError(f"no tiles for {tokens} rows of {columns} values and {features} features")
    choice = [y for y in (expert, active) if y is not None]
    blocks = choice[0].shape[0] if choice else x.shape[0] // tokens
    if tuning is None:
        tuning = default_tuning(tokens, columns, features, blocks, multiprocessors())
    tiled = columns % COLUMNS == 0
    if features % tuning.rows or (
        columns // COLUMNS % tuning.splits if tiled else tuning != Tuning(ROWS, 1, 1)
    ):
        raise ValueError(f"{tuning} does not divide {features} features of {columns} columns")
    width = COLUMNS if tiled else columns
    stage = Stage(tuning.rows, tokens, width // CHUNK, tiled)
    steps = columns // width // tuning.splits
    stages = min(tuning.stages, steps)
    room = stage.token_tiles * TOKENS
    out_dtype = out_dtype if tuning.splits == 1 else jnp.float32
    shapes: dict[str, tuple[int, ...]] = {
        "codes": (stage.rows, stage.code_row // 4),
        "scales": (stage.rows, stage.scale_row),
    }
    if not tiled:
        # Whole rows are one run of bytes, and copied as lines of 128.
        codes, scales = (y.reshape(y.shape[0], -1, 128 // y.dtype.itemsize) for y in (codes, scales))
        shapes["codes"] = (stage.rows * stage.code_row // 128, 32)
        shapes["scales"] = (stage.rows * stage.scale_row // 128, 128)
    swizzles = {"codes": swizzled(128, 4) if tiled else (), "scales": (), "x": _SWIZZLED_LINES}
    shapes["x"] = (stage.chunks, stage.token_lines, CHUNK)
    if swiglu:
        swizzles["x"], shapes["x"] = (), (columns,)
    elif tokens == 1:
        swizzles["x"], shapes["x"] = (), (stage.chunks, CHUNK)
        x = x.reshape(x.shape[0], -1, CHUNK)
    elif stage.full:
        swizzles["x"], shapes["x"] = swizzled(128, 2), (room, width)
    copies = 2 if swiglu else 3 if tokens == 1 or stage.full else 2 + stage.chunks

    def kernel(x_ref, codes_ref, scales_ref, global_ref, *refs):
        *choice_refs, out_ref, codes_smem, scales_smem, x_smem, barriers = refs
        block, tile = jax.lax.axis_index("block"), jax.lax.axis_index("tile")
        split = jax.lax.axis_index("split")
        chosen = choice_refs[0][block] if choice_refs else jnp.int32(0)

        def fetch(step):
            slot, at = jax.lax.rem(step, jnp.int32(stages)), split * steps + step

            def copy(source, target):
                plgpu.copy_gmem_to_smem(source, target, barriers.at[slot])

            for source, target in ((codes_ref, codes_smem), (scales_ref, scales_smem)):
                lines, wide = target.shape[1:]
                copy(source.at[chosen, pl.ds(tile * lines, lines), pl.ds(at * wide, wide)], target.at[slot])
            row = jax.lax.div(block, jnp.int32(share)) * tokens
            if swiglu:
                return
            if tokens == 1:
                copy(x_ref.at[row, pl.ds(at * stage.chunks, stage.chunks)], x_smem.at[slot])
                return
            if stage.full:
                copy(x_ref.at[pl.ds(row, tokens), pl.ds(at * width, width)], x_smem.at[slot])
                return
            for chunk in range(stage.chunks):
                place = pl.ds((at * stage.chunks + chunk) * CHUNK, CHUNK)
                copy(x_ref.at[pl.ds(row, tokens), place], x_smem.at[slot, chunk, pl.ds(0, tokens)])

        def accumulate(slot, sums):
            if interpret is not None:
                return sums + _interpreted(stage, codes_smem[slot], scales_smem[slot], x_smem[slot])

            @plgpu.inline_mgpu(
                arg_types=(plgpu.Layout.WG_SPLAT, *map(plgpu.RefType, swizzles.values()), _SUMS),
                return_type=plgpu.ShapeDtypeStruct((stage.rows, room), jnp.float32, layout=_SUMS),
            )
            def multiply(ctx, *operands):
                del ctx
                return emit.multiply(stage, *operands)

            return multiply(slot, codes_smem, scales_smem, x_smem, sums)

        def body(step, sums):
            slot = jax.lax.rem(step, jnp.int32(stages))
            plgpu.barrier_wait(barriers.at[slot])
            if stages < steps:
                plgpu.commit_smem()  # no warp reads the slot of the step before any more

                @pl.when(step + stages - 1 < steps)
                def _():
                    fetch(step + stages - 1)

            return accumulate(slot, sums)

        row = tile * stage.rows

        def factors():
            """What a lane's rows have to be multiplied by; read before it is needed."""
            layout = plgpu.Layout.WG_STRIDED((emit.factors(stage) * _THREADS,), vec_size=1)

            @plgpu.inline_mgpu(
                arg_types=(*[plgpu.Layout.WG_SPLAT] * 2, plgpu.RefType()),
                return_type=plgpu.ShapeDtypeStruct(
                    (emit.factors(stage) * _THREADS,), jnp.float32, layout=layout
                ),
            )
            def load(ctx, *operands):
                del ctx
                return emit.load_factors(stage, features, *operands)

            return load(row, chosen, global_ref)

        def store(sums, scale):
            if interpret is not None:
                out = (sums * scale[:, None]).T[:tokens].astype(out_ref.dtype)
                out_ref[split, pl.ds(block * tokens, tokens), pl.ds(row, stage.rows)] = out
                return

            @plgpu.inline_mgpu(
                arg_types=(
                    *[plgpu.Layout.WG_SPLAT] * 2,
                    plgpu.Layout.WG_STRIDED(scale.shape, vec_size=1),
                    plgpu.RefType(),
                    _SUMS,
                )
            )
            def write(ctx, *operands):
                del ctx
                return emit.store(stage, features, *operands)

            write((split * blocks + block) * tokens, row, scale, out_ref, sums)

        def run():
            for step in range(stages if stages == steps else stages - 1):
                fetch(jnp.int32(step))
            scale = factors() if interpret is None else global_ref[chosen, pl.ds(row, stage.rows)]
            if swiglu:
                x_smem[0] = _activated(x_ref, block, columns)
                plgpu.commit_smem()  # for all warps to read
            zeros = plgpu.layout_cast(jnp.zeros((stage.rows, room), jnp.float32), _SUMS)
            store(jax.lax.fori_loop(0, steps, body, zeros), scale)

        if not choice_refs:
            run()
        else:
            live = chosen >= 0
            pl.when(live & (block < choice_refs[1][0]) if active is not None else live)(run)

    kernel.__name__ = f"nvfp4_product_{tokens}"
    dtypes = {"codes": codes.dtype, "scales": scales.dtype, "x": jnp.bfloat16}
    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((tuning.splits, blocks * tokens, features), out_dtype),
        grid=(blocks, tuning.splits, features // stage.rows),
        grid_names=("block", "split", "tile"),
        scratch_types=[
            *(
                plgpu.SMEM((stages, *shapes[name]), dtype, transforms=swizzles[name])
                for name, dtype in dtypes.items()
            ),
            plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
        ],
        # All threads take part in what this kernel waits for; a barrier before every copy is not needed.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        interpret=interpret,
    )(x, codes, scales, global_scale, *choice)


def _activated(parts_ref, block, columns: int) -> jax.Array:
    """bfloat16[columns] silu(gate) * up of a block, from float32[parts, blocks, 2 columns] to be summed."""
    layout = plgpu.Layout.WG_STRIDED((columns,), vec_size=1)

    def total(start):
        parts = [
            plgpu.load(parts_ref.at[part, block, pl.ds(start, columns)], layout=layout, optimized=False)
            for part in range(parts_ref.shape[0])
        ]
        return sum(parts[1:], parts[0])

    gate, up = total(0), total(columns)
    return (gate / (1.0 + jnp.exp(-gate)) * up).astype(jnp.bfloat16)


def _interpreted(stage: Stage, codes, scales, x) -> jax.Array:
    """The products of a slot where no instructions can be emitted."""
    codes, scales = codes.reshape(stage.rows, -1), scales.reshape(stage.rows, stage.scale_row)
    if not stage.full:
        x = x.reshape(stage.chunks, stage.token_lines, CHUNK).swapaxes(0, 1).reshape(stage.token_lines, -1)
    x = jax.lax.slice_in_dim(x.astype(jnp.float32), 0, stage.tokens)
    tokens = jnp.pad(x, ((0, stage.token_tiles * TOKENS - stage.tokens), (0, 0)))
    return decode(codes, scales) @ tokens.T
