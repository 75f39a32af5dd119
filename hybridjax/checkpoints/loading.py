"""Loads a model from a directory of config.json and safetensors files."""

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tqdm
from flax import nnx

from hybridjax.checkpoints import float8, ngram_tables, nvfp4, quantization_config
from hybridjax.checkpoints.bundled import resolve
from hybridjax.checkpoints.checks import check_tensors, load_constants
from hybridjax.checkpoints.directory import open_weights
from hybridjax.checkpoints.generation import FILE as GENERATION_CONFIG
from hybridjax.checkpoints.generation import generation_config
from hybridjax.checkpoints.parameters import Layout, Parameter, layout_of
from hybridjax.checkpoints.safetensors_file import SafetensorsFile
from hybridjax.errors import CheckpointError, ConfigError
from hybridjax.json_files import read_object
from hybridjax.models import ARCHITECTURES, Architecture, TensorEntry
from hybridjax.models.base import Path as ParameterPath
from hybridjax.registry import Registry

Placement = jax.Device | jax.sharding.Sharding
Sharding = Placement | Callable[[ParameterPath, tuple[int, ...]], Placement]

_THREADS = 8

MODEL_DTYPES = ("float32", "bfloat16", "float16")


def load_model(
    path_or_name: str | Path,
    dtype: Any = None,
    *,
    sharding: Sharding | None = None,
    progress: bool | None = None,
    ple_offload: str = "device",
) -> Any:
    """Loads a model.

    All headers are checked before memory is allocated. Tensors are read from memory-mapped files and
    put on the device one parameter at a time, so there are never two copies of the model. Tensors in
    float8 (qwen4_exp 2.3) are decoded to ``dtype`` on the way.

    Args:
      path_or_name: a directory with config.json and safetensors files, or a bundled model's name.
      dtype: of parameters and activations, "float32", "bfloat16" or "float16" or the jnp dtype; None or
        "auto": the one that config.json names.
      sharding: where parameters go: a device, a sharding, or a function from a parameter's path and
        shape to one of these; None: the default device.
      progress: whether to show a progress bar on stderr; None: only on a terminal.
      ple_offload: where n-gram tables go (no other model heeds it): "device": they are parameters; "host":
        into RAM; "mmap": they stay in the files, which must not change as long as the model lives. In the
        last two cases the model's ``host_tables`` holds them, one HostTable per PLE layer.

    Returns:
      The nnx module of the architecture that config.json names (``hybridjax.models.ARCHITECTURES``).
      If there is a generation_config.json, its ``generation`` attribute holds that, so that saving the
      model keeps it.

    Raises:
      CheckpointError: there is no such model, its architecture is unknown, a file is malformed or has
        a value out of range, or the tensors are not exactly those that the architecture needs.
      ConfigError: dtype or ple_offload is not one of those above.
    """
    return load_directory(
        resolve(path_or_name),
        ARCHITECTURES,
        dtype=dtype,
        sharding=sharding,
        progress=progress,
        ple_offload=ple_offload,
    )


def load_config(path_or_name: str | Path) -> Any:
    """The model configuration alone, without touching the weights; raises as ``load_model`` does."""
    return read_config(resolve(path_or_name), ARCHITECTURES)[1]


def load_directory(
    directory: Path,
    architectures: Registry[Architecture],
    *,
    dtype: Any = None,
    sharding: Sharding | None = None,
    progress: bool | None = None,
    ple_offload: str = "device",
) -> Any:
    """``load_model`` for a directory and a given registry."""
    opened = open_directory(directory, architectures, dtype=dtype, ple_offload=ple_offload)
    _fill(opened.model, opened.layout.parameters, opened.weights, sharding, progress)
    return opened.model


@dataclasses.dataclass(frozen=True)
class OpenModel:
    """A model whose parameters have shapes, but no memory yet, and the files that hold them.

    Attributes:
      model: the nnx module; all but its parameters is complete.
      layout: which tensors fill which parameter.
      weights: tensor name -> the file that holds it; headers are checked.
    """

    model: Any
    layout: Layout
    weights: Mapping[str, SafetensorsFile]


def open_directory(
    directory: Path,
    architectures: Registry[Architecture] = ARCHITECTURES,
    *,
    dtype: Any = None,
    ple_offload: str = "device",
) -> OpenModel:
    """All of ``load_model`` but reading parameters; takes and raises the same."""
    architecture, config = read_config(directory, architectures)
    quantization_config.check(directory, read_object(directory / "config.json"))
    if dtype is not None and dtype != "auto":
        config = _with_dtype(config, _dtype_name(dtype))
    options = ngram_tables.model_options(config, ple_offload)
    generation = generation_config(directory, getattr(config, "vocab_size", None))
    weights = open_weights(directory)
    shapes = {name: file.tensors[name].shape for name, file in weights.items()}
    try:
        entries = architecture.model.checkpoint_entries(config, shapes)

        def build() -> Any:
            model = architecture.model(config, dtype=jnp.dtype(config.dtype), rngs=nnx.Rngs(0), **options)
            nvfp4.exchange_weights(model, entries, shapes)
            return model

        model = nnx.eval_shape(build)
        layout = layout_of(model, shapes, entries)
        check_tensors(model, layout, weights)
        load_constants(model, weights)
    except (CheckpointError, ConfigError) as error:
        raise CheckpointError(f"{directory}: {error}") from error
    if layout.tables:
        in_ram = ple_offload == "host"
        model.host_tables = tuple(
            ngram_tables.open_table(entries, weights, config.dtype, in_ram=in_ram)
            for entries in layout.tables
        )
    if nvfp4.weights_in_nvfp4(model):
        model.stored_shapes, model.nvfp4_layout = shapes, nvfp4.common_layout(shapes)
    if (directory / GENERATION_CONFIG).exists():
        model.generation = generation
    return OpenModel(model, layout, weights)


def read_config(directory: Path, architectures: Registry[Architecture]) -> tuple[Architecture, Any]:
    """The architecture that config.json names and its configuration; auto_map is ignored."""
    file = directory / "config.json"
    raw = read_object(file)
    names = raw.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise CheckpointError(f"{file}: architectures is {names!r}; it must be a list with one name")
    if names[0] not in architectures:
        raise CheckpointError(f"{file}: unknown architecture {names[0]!r}; known: {', '.join(architectures)}")
    architecture = architectures[names[0]]
    try:
        return architecture, architecture.config.from_dict(raw)
    except ConfigError as error:
        raise CheckpointError(f"{file}: {error}") from error


def _with_dtype(config: Any, name: str) -> Any:
    if not hasattr(config, "text_config"):
        return dataclasses.replace(config, dtype=name)
    text = dataclasses.replace(config.text_config, dtype=name)
    return dataclasses.replace(config, dtype=name, text_config=text)


def _dtype_name(dtype: Any) -> str:
    try:
        name = jnp.dtype(dtype).name
    except TypeError:
        name = str(dtype)
    if name not in MODEL_DTYPES:
        raise ConfigError(f"dtype is {name!r}; allowed: auto, {', '.join(MODEL_DTYPES)}")
    return name


def _fill(
    model: Any,
    parameters: Sequence[Parameter],
    weights: Mapping[str, SafetensorsFile],
    sharding: Sharding | None,
    progress: bool | None,
) -> None:
    total = sum(p.value.size * p.value.dtype.itemsize for p in parameters)
    shown = None if progress is None else not progress
    loaded: dict[ParameterPath, nnx.Variable[Any]] = {}
    previous = None
    with (
        tqdm.tqdm(total=total, unit="B", unit_scale=True, desc="loading", disable=shown) as bar,
        ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool,
    ):
        for parameter in parameters:
            host = read_parameter(parameter, weights, pool)
            place = sharding(parameter.path, parameter.shape) if callable(sharding) else sharding
            value = jax.device_put(host, place)
            # Transfers are asynchronous and keep their host buffer; at most two may be alive.
            jax.block_until_ready(previous)
            previous = value
            loaded[parameter.path] = parameter.variable.replace(value)
            bar.update(host.nbytes)
    jax.block_until_ready(previous)
    nnx.update(model, nnx.from_flat_state(loaded.items()))


def read_parameter(
    parameter: Parameter, weights: Mapping[str, SafetensorsFile], pool: ThreadPoolExecutor
) -> np.ndarray:
    """The parameter in host memory, never a view of the file: device_put may alias what it is given.

    Raises:
      CheckpointError: a value is beyond the range of the parameter's dtype, or a scale cannot be right.
    """
    out = np.empty(parameter.shape, parameter.value.dtype)

    def fill(entry: TensorEntry) -> None:
        file = weights[entry.name]
        try:
            with np.errstate(over="raise", invalid="ignore", under="ignore"):
                _copy(entry, weights, entry.part_of(out))
        except FloatingPointError as error:
            raise CheckpointError(
                f"{file.path}: tensor {entry.name} has values beyond the range of {out.dtype}"
            ) from error
        file.release(entry.name)

    # NumPy copies and decodes without the interpreter's lock.
    for _ in pool.map(fill, parameter.entries):
        pass
    return out


def _copy(entry: TensorEntry, weights: Mapping[str, SafetensorsFile], target: np.ndarray) -> None:
    """Writes a tensor to ``target`` in that array's dtype, decoded where it is in float8."""
    stored = weights[entry.name].read(entry.name)
    if entry.spread is not None or target.dtype == float8.FLOAT8:
        try:
            _copy_scales(entry, stored, target)
        except CheckpointError as error:
            raise CheckpointError(f"{weights[entry.name].path}: tensor {entry.name}: {error}") from error
    elif stored.dtype != float8.FLOAT8 or entry.scale is None:
        np.copyto(target, stored, casting="unsafe")
    elif entry.scale.block is None:
        float8.decode_table(stored, ngram_tables.read_scale(entry, weights), target)
    else:
        scales = weights[entry.scale.name]
        try:
            shape = float8.scale_shape(entry.shape, entry.scale.block)
            values = scales.read(entry.scale.name).reshape(shape)
            float8.decode_blocks(stored, values, entry.scale.block, target)
        except CheckpointError as error:
            raise CheckpointError(f"{scales.path}: tensor {entry.scale.name}: {error}") from error


def _copy_scales(entry: TensorEntry, stored: np.ndarray, target: np.ndarray) -> None:
    """Writes scales of an NVFP4 weight; raises CheckpointError if they cannot be right."""
    if entry.spread is None:
        nvfp4.check_scales(stored)
        np.copyto(target, stored)
    else:
        target[...] = nvfp4.read_number(stored, entry.inverse)
