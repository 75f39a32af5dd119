"""A large embedding table in host memory or on disk, as row-range shards.

The released n-gram table has 320 million rows (qwen4_exp 8.4): too many for most devices, and a step
reads few of them. Nothing here needs jax.
"""

import math
from collections.abc import Sequence

import ml_dtypes
import numpy as np

from hybridjax.errors import CheckpointError

ALIGNMENT = 64  # bytes, of tables in memory: what XLA expects of arrays on a CPU

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)


class HostTable:
    """Rows of the shards one after another, read as if they were one array [rows, dim].

    Nothing is copied until it is gathered, and reads share no scratch, so any number of threads may read.

    Args:
      shards: arrays [rows_i, dim] of one floating-point dtype; memory-mapped or not.
      scale: what float8_e4m3fn shards are multiplied by, both rounded to bfloat16 (qwen4_exp 2.3); None for
        other shards.
      dtype: of the rows handed out.
      total: rows that the shards must add up to; None: any number.
      in_ram: the only shard is memory of the table's own, aligned for ``MappedMemory``.

    Attributes:
      shape: (rows, dim).
      dtype: of the rows handed out.
      stored_dtype: of the shards.
      scale: as given.
      codes: with ``in_ram`` the whole table as unsigned integers [rows, dim], else None.
      values: of float8 shards, the 256 codes' values as unsigned integers of the width of ``dtype``; else
        None.

    Raises:
      CheckpointError: the shards do not fit together or not to ``total``, or the scale not to their dtype.
    """

    def __init__(
        self,
        shards: Sequence[np.ndarray],
        scale: float | None,
        dtype: np.dtype | type,
        *,
        total: int | None = None,
        in_ram: bool = False,
    ):
        _check_shards(shards, total)
        self.dtype = np.dtype(dtype)
        self.stored_dtype = shards[0].dtype
        self.scale = scale
        if (self.stored_dtype == _FLOAT8) != (scale is not None):
            raise CheckpointError(
                f"n-gram table: scale is {scale} for shards of {self.stored_dtype}; "
                "float8_e4m3fn shards need one, other shards take none"
            )
        # Row i lies in the last shard that starts at or before i.
        self._starts = np.cumsum([0, *(len(s) for s in shards)])
        self._length = _common_length(shards)
        self.shape: tuple[int, int] = (int(self._starts[-1]), shards[0].shape[1])
        # Fancy indexing of numpy's own integers copies whole rows; of ml_dtypes it goes element by element.
        self._codes = tuple(s.view(f"u{s.dtype.itemsize}") for s in shards)
        self.codes = self._codes[0] if in_ram else None
        self.values = _float8_values(scale, self.dtype) if self.stored_dtype == _FLOAT8 else None

    def gather(self, rows: np.ndarray) -> np.ndarray:
        """Integers [...] -> [..., dim] in ``dtype``.

        Raises:
          IndexError: a row outside the table.
        """
        rows = np.asarray(rows)
        flat = rows.reshape(-1)
        if flat.size and not (0 <= flat.min() and flat.max() < self.shape[0]):
            bad = flat.min() if flat.min() < 0 else flat.max()
            raise IndexError(f"row {bad} of a table of {self.shape[0]} rows")
        if len(self._codes) == 1:
            codes = self._codes[0].take(flat, axis=0)
        else:
            codes = self._gather_shards(flat)
        return self._decode(codes).reshape(*rows.shape, self.shape[1])

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Rows start .. stop - 1 in ``dtype``, [stop - start, dim]: a view where that is possible.

        Raises:
          IndexError: rows outside the table.
        """
        if not 0 <= start <= stop <= self.shape[0]:
            raise IndexError(f"rows {start}..{stop} of a table of {self.shape[0]} rows")
        first = int(np.searchsorted(self._starts, start, side="right")) - 1
        parts = []
        for i in range(first, len(self._codes)):
            base = int(self._starts[i])
            if base >= stop and parts:
                break
            parts.append(self._codes[i][max(start - base, 0) : stop - base])
        return self._decode(parts[0] if len(parts) == 1 else np.concatenate(parts))

    def to_ram(self) -> "HostTable":
        """A copy in one array in memory, made shard by shard."""
        whole = aligned_empty(self.shape, self._codes[0].dtype)
        for start, codes in zip(self._starts, self._codes):
            whole[start : start + len(codes)] = codes
        return HostTable([whole.view(self.stored_dtype)], self.scale, self.dtype, in_ram=True)

    def _gather_shards(self, flat: np.ndarray) -> np.ndarray:
        if self._length:
            shard = flat // self._length
        else:
            shard = np.searchsorted(self._starts, flat, side="right") - 1
        order = np.argsort(shard, kind="stable")
        local = (flat - self._starts[shard])[order]
        ends = np.cumsum(np.bincount(shard, minlength=len(self._codes)))
        begins = np.concatenate([[0], ends[:-1]])
        found = np.empty((len(flat), self.shape[1]), self._codes[0].dtype)
        for i in np.flatnonzero(ends > begins).tolist():
            part = slice(begins[i], ends[i])
            # Rows are known to be in range; "raise" would copy ``out`` first.
            self._codes[i].take(local[part], axis=0, out=found[part], mode="clip")
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
        return found.take(back, axis=0)

    def _decode(self, codes: np.ndarray) -> np.ndarray:
        if self.values is not None:
            return self.values.take(codes).view(self.dtype)
        return codes.view(self.stored_dtype).astype(self.dtype, copy=False)


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype | type) -> np.ndarray:
    """An uninitialised array aligned to ``ALIGNMENT``."""
    dtype = np.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def _common_length(shards: Sequence[np.ndarray]) -> int:
    """Rows of every shard if they agree (the last may have fewer), else 0."""
    length = len(shards[0])
    same = all(len(s) == length for s in shards[:-1]) and len(shards[-1]) <= length
    return length if same else 0


def _float8_values(scale: float | None, dtype: np.dtype) -> np.ndarray:
    """The value of each of the 256 codes, as integers of the width of ``dtype``."""
    codes = np.arange(256, dtype=np.uint8).view(_FLOAT8).astype(_BFLOAT16)
    values = np.multiply(codes, np.asarray(scale or 0, _BFLOAT16))
    return values.astype(dtype).view(f"u{dtype.itemsize}")


def _check_shards(shards: Sequence[np.ndarray], total: int | None) -> None:
    if not shards:
        raise CheckpointError("n-gram table: no shards")
    first = shards[0]
    for i, shard in enumerate(shards):
        if shard.ndim != 2 or not shard.size:
            raise CheckpointError(f"n-gram table: shard {i} has shape {shard.shape}; expected [rows, dim]")
        if shard.shape[1] != first.shape[1]:
            raise CheckpointError(
                f"n-gram table: shard {i} has {shard.shape[1]} columns, shard 0 has {first.shape[1]}"
            )
        if shard.dtype != first.dtype:
            raise CheckpointError(f"n-gram table: shard {i} is {shard.dtype}, shard 0 is {first.dtype}")
    rows = sum(len(s) for s in shards)
    if total is not None and rows != total:
        last = len(shards) - 1
        raise CheckpointError(
            f"n-gram table: shards 0..{last} have {rows} rows, the last {len(shards[-1])}; "
            f"the table has {total}"
        )
