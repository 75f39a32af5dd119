"""What the linear mixers do to the tokens of a prompt before and after the recurrence; see ops.mixers.

The bulk copy engine brings pieces and takes them back while others are computed with: these kernels are bound
by the bytes that they move.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from hybridjax.ops.rotary import rotary_angles
from hybridjax.pallas_kernels.pointwise.values import inverse_rms, rounded, sigmoid
from hybridjax.pallas_kernels.state_update import SIZE, multiprocessors, swizzled

ROWS = 64  # tokens of a piece
_HALF = SIZE // 2
_WGMMA = plgpu.Layout.WGMMA
_STAGES = 2
# Results are rounded to 16 bits: exponentials and roots may err in the last bits of float32.
_APPROXIMATE = plgpu.CompilerParams(approx_math=True)


def _across(x: jax.Array, axis: int, columns: int) -> jax.Array:
    """A value per token (axis 0) or per column (axis 1) spread over [64, columns]."""
    return jax.lax.broadcast_in_dim(x, (ROWS, columns), (axis,))


@functools.partial(jax.jit, static_argnames=("heads", "size", "eps", "theta", "group", "interpret"))
def lightning_rows(
    projected: jax.Array,
    q_norm: jax.Array,
    k_norm: jax.Array,
    positions: jax.Array,
    *,
    heads: int,
    size: int,
    eps: float,
    theta: float,
    group: int = 8,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As ops.lightning_rows with norms and rotation, heads of 128, 16-bit rows and N a multiple of 64.

    Args:
      group: heads per program, which keeps their angles in registers.
    """
    assert size == SIZE
    rows, dtype = projected.shape[0], projected.dtype
    group = next(n for n in (group, 4) if heads % n == 0)
    cos, sin = rotary_angles(positions, _HALF, theta)

    def kernel(source_ref, q_norm_ref, k_norm_ref, cos_ref, sin_ref, q_ref, k_ref, v_ref, *scratch):
        in_smem, out_smem, loaded = scratch
        here = pl.ds(jax.lax.axis_index("tile") * ROWS, ROWS)
        first = jax.lax.axis_index("group") * group  # of all heads: those of q, then k, then v
        kind = jax.lax.div(first, jnp.int32(heads))
        mine = jax.lax.rem(first, jnp.int32(heads))

        def fetch(i):
            buffer = jax.lax.rem(i, jnp.int32(_STAGES))
            plgpu.copy_gmem_to_smem(source_ref.at[here, first + i], in_smem.at[buffer], loaded.at[buffer])

        for i in range(min(_STAGES, group)):
            fetch(jnp.int32(i))

        def pass_on(i, _):
            buffer = jax.lax.rem(i, jnp.int32(_STAGES))
            plgpu.barrier_wait(loaded.at[buffer])
            plgpu.copy_smem_to_gmem(in_smem.at[buffer], v_ref.at[here, mine + i])

            @pl.when(i + _STAGES < group)
            def _():
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                fetch(i + _STAGES)

            return ()

        @pl.when(kind == 2)
        def _():
            jax.lax.fori_loop(0, group, pass_on, ())

        @pl.when(kind < 2)
        def _():
            angles = [plgpu.load(ref.at[here], layout=_WGMMA, optimized=False) for ref in (cos_ref, sin_ref)]

            def weight(at):
                half = pl.ds(at, _HALF)
                q, k = (
                    plgpu.load(ref.at[half], layout=_WGMMA.reduce(0), optimized=False).astype(jnp.float32)
                    for ref in (q_norm_ref, k_norm_ref)
                )
                return jnp.where(jax.lax.broadcast_in_dim(kind, (_HALF,), ()) == 0, q, k)

            weights = weight(0), weight(_HALF)

            def turn(i, _):
                buffer = jax.lax.rem(i, jnp.int32(_STAGES))
                plgpu.barrier_wait(loaded.at[buffer])
                cos, sin = angles
                halves = [
                    plgpu.load(in_smem.at[buffer, :, pl.ds(at, _HALF)], layout=_WGMMA).astype(jnp.float32)
                    for at in (0, _HALF)
                ]
                plgpu.commit_smem()
                pl.when(i + _STAGES < group)(lambda: fetch(i + _STAGES))
                low, high = halves
                by = _across(inverse_rms(jnp.sum(low * low + high * high, axis=1), SIZE, eps), 0, _HALF)
                low, high = (
                    rounded(rounded(x * by, dtype) * _across(w, 1, _HALF), dtype)
                    for x, w in zip(halves, weights)
                )
                plgpu.wait_smem_to_gmem(_STAGES - 1, wait_read_only=True)
                out_smem[buffer, :, pl.ds(0, _HALF)] = (low * cos - high * sin).astype(dtype)
                out_smem[buffer, :, pl.ds(_HALF, _HALF)] = (high * cos + low * sin).astype(dtype)
                plgpu.commit_smem()
                for index, ref in enumerate((q_ref, k_ref)):

                    @pl.when(kind == index)
                    def _(ref=ref):
                        plgpu.copy_smem_to_gmem(out_smem.at[buffer], ref.at[here, mine + i])

                return ()

            jax.lax.fori_loop(0, group, turn, ())

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    kernel.__name__ = "lightning_rows"
    transforms = swizzled(128, dtype.itemsize)
    q, k, v = plgpu.kernel(
        kernel,
        out_type=[jax.ShapeDtypeStruct((rows, heads, SIZE), dtype)] * 3,
        grid=(rows // ROWS, 3 * heads // group),
        grid_names=("tile", "group"),
        scratch_types=[
            plgpu.SMEM((_STAGES, ROWS, SIZE), dtype, transforms=transforms),
            plgpu.SMEM((_STAGES, ROWS, SIZE), dtype, transforms=transforms),
            plgpu.Barrier(num_barriers=_STAGES),
        ],
        compiler_params=_APPROXIMATE,
        interpret=interpret,
    )(projected.reshape(rows, -1, SIZE), q_norm, k_norm, cos, sin)
    return q, k, v


@functools.partial(jax.jit, static_argnames=("eps", "gate", "stages", "resident", "interpret"))
def lightning_output(
    out: jax.Array,
    projected: jax.Array,
    o_norm: jax.Array,
    *,
    eps: float,
    gate: bool,
    stages: int = 3,
    resident: int = 2,
    interpret: Any = None,
) -> jax.Array:
    """As ops.lightning_output with norm and gate, heads of 128 and 16-bit rows.

    Args:
      stages: rows in flight per program; resident: programs per multiprocessor.
    """
    assert gate
    rows, heads, _ = out.shape
    dtype, width = projected.dtype, heads * SIZE
    first = projected.shape[1] // SIZE - heads  # of the gates among all heads
    programs = min(rows, multiprocessors() * resident)
    stages = min(stages, -(-rows // programs))
    layout = plgpu.Layout.WG_STRIDED((heads, SIZE), vec_size=2)

    def kernel(out_ref, source_ref, norm_ref, result_ref, x_smem, gate_smem, result_smem, loaded):
        program = jax.lax.axis_index("program")
        mine = jax.lax.div(rows - 1 - program, jnp.int32(programs)) + 1

        def fetch(i):
            row, buffer = program + i * programs, jax.lax.rem(i, jnp.int32(stages))
            plgpu.copy_gmem_to_smem(out_ref.at[row], x_smem.at[buffer], loaded.at[buffer])
            gates = source_ref.at[row, pl.ds(first, heads)]
            plgpu.copy_gmem_to_smem(gates, gate_smem.at[buffer], loaded.at[buffer])

        for i in range(stages):
            pl.when(i < mine)(functools.partial(fetch, jnp.int32(i)))
        weight = plgpu.load(norm_ref, layout=layout, optimized=False).astype(jnp.float32)

        def step(i, _):
            buffer, turn = jax.lax.rem(i, jnp.int32(stages)), jax.lax.rem(i, jnp.int32(2))
            plgpu.barrier_wait(loaded.at[buffer])
            x, gates = (
                plgpu.load(smem.at[buffer], layout=layout, optimized=False) for smem in (x_smem, gate_smem)
            )
            plgpu.commit_smem()
            pl.when(i + stages < mine)(lambda: fetch(i + stages))
            x = rounded(x, dtype)
            x = rounded(rounded(x * inverse_rms(jnp.sum(x * x), width, eps), dtype) * weight, dtype)
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            result_smem[turn] = (x * rounded(sigmoid(gates.astype(jnp.float32)), dtype)).astype(dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(result_smem.at[turn], result_ref.at[program + i * programs])
            return ()

        jax.lax.fori_loop(0, mine, step, ())
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    kernel.__name__ = "lightning_output"
    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((rows, heads, SIZE), dtype),
        grid=(programs,),
        grid_names=("program",),
        scratch_types=[
            plgpu.SMEM((stages, heads, SIZE), jnp.float32),
            plgpu.SMEM((stages, heads, SIZE), dtype),
            plgpu.SMEM((2, heads, SIZE), dtype),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        ],
        compiler_params=_APPROXIMATE,
        interpret=interpret,
    )(out, projected.reshape(rows, -1, SIZE), o_norm.reshape(heads, SIZE)).reshape(rows, width)


@functools.partial(jax.jit, static_argnames=("first", "eps", "activation", "interpret"))
def gated_delta_output(
    out: jax.Array,
    projected: jax.Array,
    norm: jax.Array,
    *,
    first: int,
    eps: float,
    activation: str,
    interpret: Any = None,
) -> jax.Array:
    """ops.gated_rms_norm of float32[N, H, 128] by columns of a projection, 16-bit rows, N a multiple of 64.

    A program has one piece, several fit a multiprocessor.

    Args:
      first: the first column of the gates.
    """
    rows, heads, _ = out.shape
    dtype = projected.dtype
    halves = [pl.ds(at, _HALF) for at in (0, _HALF)]

    def kernel(out_ref, projected_ref, norm_ref, result_ref, x_smem, gate_smem, loaded):
        here = pl.ds(jax.lax.axis_index("tile") * ROWS, ROWS)
        head = jax.lax.axis_index("head")
        plgpu.copy_gmem_to_smem(out_ref.at[here, head], x_smem, loaded)
        plgpu.copy_gmem_to_smem(projected_ref.at[here, pl.ds(first + head * SIZE, SIZE)], gate_smem, loaded)
        weights = [
            plgpu.load(norm_ref.at[half], layout=_WGMMA.reduce(0), optimized=False).astype(jnp.float32)
            for half in halves
        ]
        plgpu.barrier_wait(loaded)
        squares = jnp.zeros((ROWS,), jnp.float32)
        for half in halves:
            x = plgpu.load(x_smem.at[:, half], layout=_WGMMA)
            squares = squares + jnp.sum(x * x, axis=1)
        by = _across(inverse_rms(squares, SIZE, eps), 0, _HALF)
        for half, weight in zip(halves, weights):
            gate = plgpu.load(gate_smem.at[:, half], layout=_WGMMA).astype(jnp.float32)
            x = plgpu.load(x_smem.at[:, half], layout=_WGMMA) * by * _across(weight, 1, _HALF)
            act = sigmoid(gate) if activation == "sigmoid" else gate * sigmoid(gate)
            gate_smem[:, half] = (x * act).astype(dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(gate_smem, result_ref.at[here, head])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    kernel.__name__ = "gated_delta_output"
    # The copy engine takes no rows that do not consist of whole swizzle units.
    unit = next(n for n in (128, 64, 32) if projected.shape[1] * dtype.itemsize % n == 0)
    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(out.shape, dtype),
        grid=(rows // ROWS, heads),
        grid_names=("tile", "head"),
        scratch_types=[
            plgpu.SMEM((ROWS, SIZE), jnp.float32, transforms=swizzled(128, 4)),
            plgpu.SMEM((ROWS, SIZE), dtype, transforms=swizzled(unit, dtype.itemsize)),
            plgpu.Barrier(num_arrivals=2),
        ],
        compiler_params=_APPROXIMATE,
        interpret=interpret,
    )(out, projected, norm)
