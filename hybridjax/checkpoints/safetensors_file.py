"""Reads and writes safetensors files with memory mapping; needs neither torch nor pickle.

Layout: the header's length as uint64 (little endian), a JSON header, then the tensors one after another.
Source: github.com/huggingface/safetensors, "Format".
"""

import dataclasses
import json
import math
import mmap
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from hybridjax.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000
_MAX_DIMENSIONS = 8
_MAX_TENSOR_BYTES = 2**50

DTYPES: dict[str, np.dtype] = {
    name: np.dtype(kind)
    for name, kind in {
        "BOOL": np.bool_,
        "U8": np.uint8,
        "I8": np.int8,
        "F8_E4M3": ml_dtypes.float8_e4m3fn,
        "F8_E5M2": ml_dtypes.float8_e5m2,
        "F8_E8M0": ml_dtypes.float8_e8m0fnu,
        "I16": np.int16,
        "U16": np.uint16,
        "F16": np.float16,
        "BF16": ml_dtypes.bfloat16,
        "I32": np.int32,
        "U32": np.uint32,
        "F32": np.float32,
        "I64": np.int64,
        "U64": np.uint64,
        "F64": np.float64,
    }.items()
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """A tensor as the header describes it; ``start`` and ``end`` are byte offsets in the file."""

    dtype: np.dtype
    shape: tuple[int, ...]
    start: int
    end: int


class SafetensorsFile:
    """An open file, mapped read-only. Everything is validated on opening, before any tensor is read.

    Attributes:
      path: the file.
      tensors: name -> TensorInfo, in the header's order.
      metadata: the free-form strings under ``__metadata__``.
    """

    def __init__(self, path: str | Path):
        """Opens and validates.

        Raises:
          CheckpointError: the file is missing or truncated, the header is too long or malformed, a dtype
            is unknown, or the tensors do not fill the file exactly.
        """
        self.path = Path(path)
        try:
            self._map, size = _map_file(self.path)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.path}: cannot open: {error}") from error
        try:
            header, begin = _read_header(self._map, size)
            self.metadata: dict[str, str] = header.pop("__metadata__", {})
            if not isinstance(self.metadata, dict) or not all(
                isinstance(value, str) for value in self.metadata.values()
            ):
                raise CheckpointError("__metadata__ must map names to strings")
            self.tensors = {name: _tensor_info(name, item, begin) for name, item in header.items()}
            _check_tiling(self.tensors, begin, size)
        except CheckpointError as error:
            raise CheckpointError(f"{self.path}: {error}") from error

    def read(self, name: str) -> np.ndarray:
        """A read-only view of a tensor; pages come from disk as they are touched."""
        info = self.tensors[name]
        count = (info.end - info.start) // info.dtype.itemsize
        flat = np.frombuffer(self._map, info.dtype, count, info.start if count else 0)
        return flat.reshape(info.shape)

    def release(self, name: str) -> None:
        """Takes a tensor's pages out of this process's memory; views stay valid and read them again."""
        info = self.tensors[name]
        start = info.start // mmap.PAGESIZE * mmap.PAGESIZE
        if info.end > start and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED, start, info.end - start)


def _map_file(path: Path) -> tuple[mmap.mmap, int]:
    if not path.is_file():
        raise FileNotFoundError("no such file")
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < 8:
            raise ValueError(f"the file has {size} bytes; at least 8 are needed")
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), size


def _read_header(data: mmap.mmap, size: int) -> tuple[dict[str, Any], int]:
    """The parsed header and the offset of the first tensor."""
    (length,) = struct.unpack("<Q", data[:8])
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(f"the header claims {length} bytes; at most {MAX_HEADER_BYTES} are allowed")
    if 8 + length > size:
        raise CheckpointError(f"truncated: the header claims {length} bytes, the file has {size}")
    if data[8:9] != b"{":
        raise CheckpointError("the header does not start with '{'; this is no safetensors file")
    try:
        header = json.loads(data[8 : 8 + length].decode(), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"the header is not JSON: {error}") from error
    return header, 8 + length


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) < len(pairs):
        raise ValueError("a name appears twice in one object")
    return out


def _tensor_info(name: str, item: Any, begin: int) -> TensorInfo:
    if not isinstance(item, dict) or item.keys() != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"tensor {name!r} must have dtype, shape and data_offsets, nothing else")
    dtype = DTYPES.get(item["dtype"]) if isinstance(item["dtype"], str) else None
    if dtype is None:
        raise CheckpointError(f"tensor {name!r} has dtype {item['dtype']!r}; known: {', '.join(DTYPES)}")
    shape, offsets = item["shape"], item["data_offsets"]
    if not _naturals(shape) or len(shape) > _MAX_DIMENSIONS:
        raise CheckpointError(
            f"tensor {name!r} has shape {_shown(shape)}; it must be a list of at most {_MAX_DIMENSIONS} sizes"
        )
    if math.prod(max(n, 1) for n in shape) * dtype.itemsize > _MAX_TENSOR_BYTES:
        raise CheckpointError(f"tensor {name!r} has shape {_shown(shape)}, which is impossibly large")
    if not _naturals(offsets) or len(offsets) != 2:
        raise CheckpointError(f"tensor {name!r} has data_offsets {_shown(offsets)}; it must be [begin, end]")
    needed = math.prod(shape) * dtype.itemsize
    if offsets[1] - offsets[0] != needed:
        raise CheckpointError(
            f"tensor {name!r} has data_offsets {_shown(offsets)}; {item['dtype']}{shape} needs {needed} bytes"
        )
    return TensorInfo(dtype, tuple(shape), begin + offsets[0], begin + offsets[1])


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) < 100 else text[:100] + "..."


def _check_tiling(tensors: Mapping[str, TensorInfo], begin: int, size: int) -> None:
    """Tensors must lie side by side from the header's end to the file's end: no gaps, no overlaps."""
    position = begin
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
        if info.start != position:
            kind = "leaves a gap" if info.start > position else "overlaps another tensor"
            raise CheckpointError(f"tensor {name!r} {kind}: it starts at byte {info.start}, not {position}")
        position = info.end
    if position != size:
        kind = "truncated" if position > size else "data after the last tensor"
        raise CheckpointError(f"{kind}: the tensors end at byte {position}, the file has {size}")


def write_safetensors(
    path: Path,
    tensors: Mapping[str, tuple[np.dtype, tuple[int, ...]]],
    read: Callable[[str], np.ndarray | Iterator[np.ndarray]],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes a file tensor by tensor, so that only one needs to be in memory.

    Args:
      path: the file to create.
      tensors: name -> dtype and shape, in the order in which they are written.
      read: gives the tensor of a name, whole or as consecutive rows; called once for each.
      metadata: free-form strings.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    position = 0
    for name, (dtype, shape) in tensors.items():
        if dtype not in _NAMES:
            raise CheckpointError(f"{path}: tensor {name!r} has dtype {dtype}, which safetensors lacks")
        end = position + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [position, end]}
        position = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("xb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        for name, (dtype, shape) in tensors.items():
            value = read(name)
            rows = 0
            for piece in value if isinstance(value, Iterator) else [value]:
                whole = (rows + len(piece), *piece.shape[1:]) if piece.ndim else ()
                if piece.dtype != dtype or len(whole) != len(shape) or whole[1:] != shape[1:]:
                    raise CheckpointError(f"{path}: tensor {name!r} is {piece.dtype}{list(piece.shape)} now")
                rows = whole[0] if whole else 0
                file.write(np.ascontiguousarray(piece).reshape(-1).view(np.uint8))
            if shape and rows != shape[0]:
                raise CheckpointError(f"{path}: tensor {name!r} has {rows} rows now, not {shape[0]}")
