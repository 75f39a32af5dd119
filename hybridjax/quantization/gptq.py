"""GPTQ: codes that make the error of x W^T small, not that of W (arXiv 2210.17323; minicpm_sala 4.5).

The columns of a matrix are rounded one after the other. What a column loses is made up for by those still to
come, as the Hessian X^T X of the inputs tells. The scales of the blocks are given and do not move.
"""

import functools

import jax
import jax.numpy as jnp

from hybridjax.quantization.nvfp4 import GROUP, encode, nearest

ORDERINGS = ("static", "none")
_HIGHEST = jax.lax.Precision.HIGHEST


@functools.partial(jax.jit, static_argnames=("damp", "ordering", "block"))
def gptq(
    weight: jax.Array,
    hessian: jax.Array,
    scales: jax.Array,
    global_scale: jax.Array,
    *,
    damp: float = 0.01,
    ordering: str = "static",
    block: int = 128,
) -> tuple[jax.Array, jax.Array]:
    """Codes of a matrix under given scales.

    A column whose input was always zero becomes zero. Where the Hessian has no finite factor, or the updates
    overflow, the result is that of plain rounding.

    Args:
      weight: float32[N, K].
      hessian: float32[K, K], the sum of x^T x over the calibration rows, times any factor.
      scales: float8_e4m3fn[N, K / 16].
      global_scale: float32[], or [N, 1] where rows come from several tensors.
      damp: this share of the mean of the diagonal (of inputs that were not always zero) is added to it.
      ordering: "static": columns in descending order of the diagonal, each under the scale of the block that
        it belongs to; "none": from left to right.
      block: columns between two updates of all that follow.

    Returns:
      float4_e2m1fn[N, K], and bool[]: False where it is plain rounding.

    Raises:
      ValueError: an unknown ordering, or shapes that do not fit.
    """
    rows, columns = weight.shape
    if ordering not in ORDERINGS:
        raise ValueError(f"ordering is {ordering!r}; allowed: {', '.join(ORDERINGS)}")
    if columns % GROUP or hessian.shape != (columns, columns) or scales.shape != (rows, columns // GROUP):
        raise ValueError(
            f"weight {list(weight.shape)}, hessian {list(hessian.shape)} and scales {list(scales.shape)} do "
            f"not fit: they must be [N, K], [K, K] and [N, K / {GROUP}]"
        )
    hessian = (hessian + hessian.T) / 2
    diagonal = jnp.diagonal(hessian)
    # Not <= 0: NaN is not dead, but makes the factor fail.
    dead = diagonal == 0
    order = jnp.argsort(-diagonal, stable=True) if ordering == "static" else jnp.arange(columns)
    factor = _factor(hessian[order][:, order], dead[order], damp)
    # Transposed: a column is then contiguous. Whole blocks: what is added is zero and stays so.
    padding = -columns % block
    moving = jnp.where(dead, 0.0, weight).T[order]
    moving = jnp.pad(moving, ((0, padding), (0, 0)))
    padded = jnp.pad(factor, ((0, padding), (0, padding)))
    padded = padded + jnp.diag((jnp.arange(columns + padding) >= columns).astype(jnp.float32))
    group = jnp.pad(order // GROUP, (0, padding))
    steps = (scales.astype(jnp.float32) * global_scale).T
    values = _round_blocks(moving, padded, steps, group, block)[:columns]
    values = jnp.zeros_like(values).at[order].set(values).T
    fine = jnp.all(jnp.isfinite(factor)) & jnp.all(jnp.isfinite(values))
    plain = encode(weight, scales, global_scale)
    return jnp.where(fine, values.astype(plain.dtype), plain), fine


def _factor(hessian: jax.Array, dead: jax.Array, damp: float) -> jax.Array:
    """The upper triangular U with (H + damping)^-1 = U^T U; not finite where there is none."""
    live = jnp.maximum(jnp.sum(~dead), 1)
    mean = jnp.sum(jnp.diagonal(hessian)) / live.astype(jnp.float32)
    mean = jnp.where(mean == 0, 1.0, mean)
    damped = hessian + jnp.diag(damp * mean + jnp.where(dead, mean, 0.0))
    # With all indices reversed, L L^T = H gives H = R R^T with an upper R, and U is its inverse: one
    # factorisation, and no explicit inverse of H.
    lower = jnp.linalg.cholesky(damped[::-1, ::-1])
    identity = jnp.eye(hessian.shape[0], dtype=jnp.float32)
    return jax.lax.linalg.triangular_solve(lower, identity, left_side=True, lower=True)[::-1, ::-1]


def _round_blocks(
    moving: jax.Array, factor: jax.Array, steps: jax.Array, group: jax.Array, block: int
) -> jax.Array:
    """The values of the codes, [K, N], of a transposed matrix [K, N] in the order of rounding.

    Args:
      factor: [K, K] upper; steps: [K / 16, N] sizes of a code's unit; group: int32[K] the step of each row.
    """

    def one_block(i: jax.Array, moving: jax.Array) -> jax.Array:
        start = i * block
        ahead = jax.lax.dynamic_slice_in_dim(factor, start, block)
        corner = jax.lax.dynamic_slice_in_dim(ahead, start, block, axis=1)
        step = steps[jax.lax.dynamic_slice_in_dim(group, start, block)]

        def one_row(j: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            current, errors = carry
            value = nearest(current[j], step[j]).astype(jnp.float32)
            error = (current[j] - value * step[j]) / corner[j, j]
            current = (current - corner[j][:, None] * error[None, :]).at[j].set(value)
            return current, errors.at[j].set(error)

        current = jax.lax.dynamic_slice_in_dim(moving, start, block)
        current, errors = jax.lax.fori_loop(0, block, one_row, (current, jnp.zeros_like(current)))
        # The factor is zero left of the corner, so finished rows stay what they are.
        moving = moving - jnp.einsum("jk,jn->kn", ahead, errors, precision=_HIGHEST)
        return jax.lax.dynamic_update_slice_in_dim(moving, current, start, axis=0)

    return jax.lax.fori_loop(0, moving.shape[0] // block, one_block, moving)
