"""Ways to take a checkpoint apart and put it together wrongly."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from hybridjax.checkpoints.safetensors_file import SafetensorsFile, write_safetensors

GOLDENS = Path(__file__).parent.parent / "goldens" / "minicpm_sala"
QWEN_GOLDENS = GOLDENS.parent / "qwen4_exp"


def edit_config(directory: Path, **changes: Any) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def edit_tensors(file: Path, change: Callable[[dict[str, np.ndarray]], Any]) -> None:
    tensors = {name: value.copy() for name, value in load_file(file).items()}
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def edit_stored(directory: Path, change: Callable[[dict[str, np.ndarray]], Any]) -> dict[str, np.ndarray]:
    """Rewrites model.safetensors through this package's code, which knows float8; returns the tensors."""
    file = directory / "model.safetensors"
    tensors = read_all(file)
    change(tensors)
    file.unlink()
    layout = {name: (value.dtype, value.shape) for name, value in tensors.items()}
    write_safetensors(file, layout, tensors.__getitem__, {"format": "pt"})
    return tensors


def read_all(file: Path) -> dict[str, np.ndarray]:
    source = SafetensorsFile(file)
    return {name: source.read(name).copy() for name in source.tensors}


def split_file(directory: Path, parts: int = 2) -> dict[str, str]:
    """Turns model.safetensors into shards with an index; returns the weight map."""
    whole = load_file(directory / "model.safetensors")
    weight_map: dict[str, str] = {}
    for i in range(parts):
        file = f"model-{i + 1:05d}-of-{parts:05d}.safetensors"
        shard = {name: whole[name] for name in sorted(whole)[i::parts]}
        save_file(shard, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    (directory / "model.safetensors").unlink()
    write_index(directory, weight_map)
    return weight_map


def write_index(directory: Path, weight_map: Any) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def write_raw(file: Path, header: Any, data: bytes = b"") -> Path:
    """A safetensors file with any header, given as bytes or as something to encode."""
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)
    return file
