"""The order in which Blackwell's tensor cores read block scales (minicpm_sala 4.3)."""

import jax
import jax.numpy as jnp

_ROWS, _COLUMNS = 128, 4


def swizzle_scales(scales: jax.Array) -> jax.Array:
    """[M, C] -> [ceil(M / 128), ceil(C / 4), 512]: padded with zeros, (m, c) of each 128 x 4 tile at byte
    (m % 32) * 16 + m // 32 * 4 + c."""
    rows, columns = scales.shape
    padded = jnp.pad(scales, ((0, -rows % _ROWS), (0, -columns % _COLUMNS)))
    tiles = padded.reshape(-1, 4, 32, padded.shape[1] // _COLUMNS, _COLUMNS)
    return tiles.transpose(0, 3, 2, 1, 4).reshape(tiles.shape[0], tiles.shape[3], _ROWS * _COLUMNS)


def unswizzle_scales(swizzled: jax.Array, rows: int, columns: int) -> jax.Array:
    """The inverse of ``swizzle_scales`` for scales [rows, columns]."""
    high, wide, _ = swizzled.shape
    tiles = swizzled.reshape(high, wide, 32, 4, _COLUMNS).transpose(0, 3, 2, 1, 4)
    return tiles.reshape(high * _ROWS, wide * _COLUMNS)[:rows, :columns]
