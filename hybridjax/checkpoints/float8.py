"""Weights stored in float8_e4m3fn with scales beside them, decoded to a model's dtype.

Source: qwen4_exp 2.3.
"""

import math

import ml_dtypes
import numpy as np

from hybridjax.errors import CheckpointError
from hybridjax.host_table import HostTable

FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
SCALE_DTYPES = frozenset(map(np.dtype, (np.float32, ml_dtypes.bfloat16)))

_VALUES = np.arange(256, dtype=np.uint8).view(FLOAT8).astype(np.float32)
_ROWS_AT_ONCE = 2**16


def scale_shape(shape: tuple[int, ...], block: tuple[int, int] | None) -> tuple[int, ...]:
    """Shape of the scales of a tensor: one per block, ragged ones at the edges included, or one in all."""
    if block is None:
        return (1,)
    return tuple(math.ceil(size / edge) for size, edge in zip(shape, block))


def decode_blocks(codes: np.ndarray, scales: np.ndarray, block: tuple[int, int], out: np.ndarray) -> None:
    """out = codes * scales, multiplied in float32 and rounded once.

    Args:
      codes: float8_e4m3fn[rows, columns].
      scales: float32 or bfloat16, one per block: ``scale_shape(codes.shape, block)``.
      block: rows and columns that share a scale.
      out: [rows, columns] of a floating-point dtype.

    Raises:
      CheckpointError: a scale is not finite, or below 0.
    """
    wide = scales.astype(np.float32)
    if not np.isfinite(wide).all() or (wide < 0).any():
        raise CheckpointError("a scale is not finite, or below 0")
    rows, columns = codes.shape
    height, width = block
    for i in range(len(scales)):
        band = slice(i * height, min((i + 1) * height, rows))
        factors = np.repeat(scales[i].astype(np.float32), width)[:columns]
        values = _VALUES.take(codes[band].view(np.uint8))
        values *= factors
        np.copyto(out[band], values, casting="unsafe")


def single_scale(scale: np.ndarray) -> float:
    """The one scale of a tensor.

    Raises:
      CheckpointError: it is not finite and above 0.
    """
    value = float(scale.reshape(-1)[0])
    if not 0 < value < math.inf:
        raise CheckpointError(f"the scale is {value}; it must be finite and above 0")
    return value


def decode_table(codes: np.ndarray, scale: float, out: np.ndarray) -> None:
    """out = codes * scale, as ``HostTable`` computes it; both are [rows, dim]."""
    table = HostTable([codes], scale, out.dtype)
    for start in range(0, len(out), _ROWS_AT_ONCE):
        stop = min(start + _ROWS_AT_ONCE, len(out))
        out[start:stop] = table.rows(start, stop)
