"""N-gram tables that stay out of device memory: opened from a checkpoint's files, and written back.

The released table has 95 GiB (qwen4_exp 2.1), so nothing here ever holds two copies of one.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hybridjax.checkpoints.float8 import FLOAT8, single_scale
from hybridjax.checkpoints.safetensors_file import SafetensorsFile
from hybridjax.errors import CheckpointError, ConfigError
from hybridjax.host_table import HostTable, aligned_empty
from hybridjax.models.base import Path, TensorEntry
from hybridjax.models.qwen4_exp_entries import table_path

OFFLOADS = ("device", "host", "mmap")
_ROWS_AT_ONCE = 2**16


def model_options(config: Any, ple_offload: str) -> dict[str, Any]:
    """Keyword arguments for the model class: none for a model without n-gram tables.

    Raises:
      ConfigError: ple_offload is none of OFFLOADS.
    """
    if ple_offload not in OFFLOADS:
        raise ConfigError(f"ple_offload is {ple_offload!r}; allowed: {', '.join(OFFLOADS)}")
    text = getattr(config, "text_config", config)
    if ple_offload == "device" or not getattr(text, "ple_layers", ()):
        return {}
    return {"ngram_table": "host"}


def table_paths(model: Any) -> list[Path]:
    """Paths of the parameters that a model would have if its n-gram tables were on the device."""
    if getattr(model, "ngram_table", "device") != "host":
        return []
    return [table_path(layer) for layer in model.text_config.ple_layers]


def open_table(
    entries: Sequence[TensorEntry], weights: Mapping[str, SafetensorsFile], dtype: Any, *, in_ram: bool
) -> HostTable:
    """The table whose row ranges these tensors hold, in order; their headers have been checked.

    Args:
      entries: the tensors.
      weights: the files that hold them, by name.
      dtype: of the rows that the table hands out.
      in_ram: whether to copy the shards, one by one; otherwise they stay views of the files.

    Raises:
      CheckpointError: the scale is out of range, or memory does not suffice.
    """
    scale = None
    if weights[entries[0].name].tensors[entries[0].name].dtype == FLOAT8:
        scale = read_scale(entries[0], weights)
    shards = [weights[entry.name].read(entry.name) for entry in entries]
    rows = entries[-1].start + entries[-1].shape[0]
    if in_ram:
        shards = [_copied(entries, shards, weights, rows)]
    return HostTable(shards, scale, np.dtype(dtype), total=rows, in_ram=in_ram)


def read_scale(entry: TensorEntry, weights: Mapping[str, SafetensorsFile]) -> float:
    """The one scale of a float8 tensor; raises CheckpointError if it is not finite and above 0."""
    assert entry.scale is not None
    file = weights[entry.scale.name]
    try:
        return single_scale(file.read(entry.scale.name))
    except CheckpointError as error:
        raise CheckpointError(f"{file.path}: tensor {entry.scale.name}: {error}") from error


def _copied(
    entries: Sequence[TensorEntry],
    shards: Sequence[np.ndarray],
    weights: Mapping[str, SafetensorsFile],
    rows: int,
) -> np.ndarray:
    try:
        out = aligned_empty((rows, shards[0].shape[1]), shards[0].dtype)
    except MemoryError as error:
        size = rows * shards[0].shape[1] * shards[0].itemsize / 2**30
        raise CheckpointError(
            f"an n-gram table of {size:.1f} GiB does not fit into host memory; ple_offload='mmap' leaves it "
            "on the disk"
        ) from error
    for entry, shard in zip(entries, shards):
        out[entry.start : entry.start + entry.shape[0]] = shard
        weights[entry.name].release(entry.name)
    return out


def pieces(table: HostTable, start: int, stop: int) -> Iterator[np.ndarray]:
    """Rows start .. stop - 1 of a table, a few at a time."""
    for first in range(start, stop, _ROWS_AT_ONCE):
        yield table.rows(first, min(first + _ROWS_AT_ONCE, stop))
