"""The quantised checkpoint: what was quantised in NVFP4's tensors, all else as it was stored."""

import functools
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from hybridjax.calibration.results import WorkDirectory
from hybridjax.calibration.selection import Plan
from hybridjax.checkpoints import nvfp4, quantization_config
from hybridjax.checkpoints.generation import FILE as GENERATION_CONFIG
from hybridjax.checkpoints.parameters import Layout
from hybridjax.checkpoints.safetensors_file import SafetensorsFile
from hybridjax.checkpoints.saving import (
    PROCESSOR_FILES,
    StoredTensor,
    replacing,
    without_quantization,
    write_tensors,
)
from hybridjax.errors import ConfigError
from hybridjax.json_files import read_object, write_object
from hybridjax.quantization import NVFP4

_SHARD_BYTES = 5 * 2**30
_SMALLEST_AMAX = 1e-34  # below, the global scale is no normal float32
# Exponent bits of the float formats; as integers, magnitudes have the order of their values.
_LIMITS = {"bfloat16": (0x7FFF, 0x7F80), "float16": (0x7FFF, 0x7C00), "float32": (0x7FFFFFFF, 0x7F800000)}
_LIMITS["float8_e4m3fn"] = (0x7F, 0x7F)


def replaced_by(plan: Plan, layout: Layout) -> dict[str, list[str]]:
    """Tensors of the original that are quantised -> the weights that take their place."""
    wanted = {entry.name for entry in plan.targets}
    by_path: dict[object, list[str]] = {}
    for index, layer in enumerate(plan.layers):
        for held in layer.experts.values():
            for entry in held:
                by_path.setdefault(("layers", index, *entry.path[2:]), []).append(entry.name)
    out: dict[str, list[str]] = {}
    for parameter in layout.parameters:
        for entry in parameter.entries:
            if entry.name in wanted:
                out[entry.name] = [entry.name]
            elif parameter.path in by_path:
                out[entry.name] = by_path[parameter.path]
    return out


def check_weights(names: Sequence[str], weights: Mapping[str, SafetensorsFile]) -> None:
    """Reads the tensors that are to be quantised, once.

    Raises:
      ConfigError: one holds values that are not finite, or is so small that its scale would be zero.
    """
    for name in names:
        file = weights[name]
        stored = file.read(name)
        mask, infinite = _LIMITS[stored.dtype.name]
        bits = stored.view(f"u{stored.dtype.itemsize}")
        largest = np.max(bits & bits.dtype.type(mask), initial=0)
        if largest >= infinite:
            raise ConfigError(f"{name} in {file.path.name} holds values that are not finite")
        amax = float(np.asarray(largest, bits.dtype).view(stored.dtype).astype(np.float32))
        if 0 < amax < _SMALLEST_AMAX:
            raise ConfigError(
                f"{name} in {file.path.name} has a largest value of {amax:.3g}, whose scale would be 0; "
                "skip it"
            )
        file.release(name)


def write(
    source: Path,
    target: Path,
    work: WorkDirectory,
    plan: Plan,
    layout: Layout,
    weights: Mapping[str, SafetensorsFile],
    form: str,
) -> None:
    """Writes the checkpoint from the layers in the work directory; it is in place whole or not at all.

    Args:
      source: the original's directory.
      target: the directory to create or replace.
      work: with the results of all layers.
      plan, layout, weights: of the original.
      form: one of nvfp4.FORMATS.
    """
    results = {}
    for index, layer in enumerate(plan.layers):
        if layer.entries:
            results |= work.load(index)[0]
    replacements = replaced_by(plan, layout)
    dropped = {
        entry.scale.name
        for parameter in layout.parameters
        for entry in parameter.entries
        if entry.scale is not None and entry.name in replacements
    }
    tensors: dict[str, StoredTensor] = {}
    for name, file in weights.items():
        if name in replacements:
            for new in replacements[name]:
                for stored, value in _stored(new, results[new], form).items():
                    tensors[stored] = StoredTensor(
                        value.dtype, value.shape, functools.partial(np.asarray, value)
                    )
        elif name not in dropped:
            info = file.tensors[name]
            tensors[name] = StoredTensor(info.dtype, info.shape, functools.partial(file.read, name))
    config, apart = quantization_config.of_tensors(tensors, form)
    with replacing(target) as staging:
        write_tensors(staging, tensors, _SHARD_BYTES)
        raw = without_quantization(read_object(source / "config.json"))
        raw.pop("auto_map", None)
        write_object(staging / "config.json", raw | {"quantization_config": config})
        if apart is not None:
            write_object(staging / quantization_config.FILE, apart)
        for name in (GENERATION_CONFIG, *PROCESSOR_FILES):
            if (source / name).is_file():
                shutil.copyfile(source / name, staging / name)


def _stored(name: str, result: tuple[NVFP4, float | None], form: str) -> dict[str, np.ndarray]:
    weight, input_scale = result
    return nvfp4.stored_tensors(name, weight, input_scale, form)
