"""Loads a model from a directory of config.json and safetensors files."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tqdm
from flax import nnx

from hybridjax.checkpoints.bundled import resolve
from hybridjax.checkpoints.directory import listing, open_weights
from hybridjax.checkpoints.generation import FILE as GENERATION_CONFIG
from hybridjax.checkpoints.generation import generation_config
from hybridjax.checkpoints.parameters import Parameter, parameters_of
from hybridjax.checkpoints.safetensors_file import SafetensorsFile
from hybridjax.errors import CheckpointError, ConfigError
from hybridjax.json_files import read_object
from hybridjax.models import ARCHITECTURES, Architecture
from hybridjax.models.base import Path as ParameterPath
from hybridjax.registry import Registry

Placement = jax.Device | jax.sharding.Sharding
Sharding = Placement | Callable[[ParameterPath, tuple[int, ...]], Placement]

MODEL_DTYPES = ("float32", "bfloat16", "float16")
_FLOATS = frozenset(jnp.dtype(name) for name in MODEL_DTYPES)


def load_model(
    path_or_name: str | Path,
    dtype: Any = None,
    *,
    sharding: Sharding | None = None,
    progress: bool | None = None,
) -> Any:
    """Loads a model.

    All headers are checked before memory is allocated. Tensors are read from memory-mapped files and
    put on the device one parameter at a time, so there are never two copies of the model.

    Args:
      path_or_name: a directory with config.json and safetensors files, or a bundled model's name.
      dtype: of parameters and activations, "float32", "bfloat16" or "float16" or the jnp dtype; None or
        "auto": the one that config.json names.
      sharding: where parameters go: a device, a sharding, or a function from a parameter's path and
        shape to one of these; None: the default device.
      progress: whether to show a progress bar on stderr; None: only on a terminal.

    Returns:
      The nnx module of the architecture that config.json names (``hybridjax.models.ARCHITECTURES``).
      If there is a generation_config.json, its ``generation`` attribute holds that, so that saving the
      model keeps it.

    Raises:
      CheckpointError: there is no such model, its architecture is unknown, a file is malformed or has
        a value out of range, or the tensors are not exactly those that the architecture needs.
      ConfigError: dtype is not one of those above.
    """
    return load_directory(
        resolve(path_or_name), ARCHITECTURES, dtype=dtype, sharding=sharding, progress=progress
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
) -> Any:
    """``load_model`` for a directory and a given registry."""
    architecture, config = read_config(directory, architectures)
    if dtype is not None and dtype != "auto":
        config = dataclasses.replace(config, dtype=_dtype_name(dtype))
    generation = generation_config(directory, getattr(config, "vocab_size", None))
    weights = open_weights(directory)
    model = nnx.eval_shape(
        lambda: architecture.model(config, dtype=jnp.dtype(config.dtype), rngs=nnx.Rngs(0))
    )
    parameters = parameters_of(model)
    _check_tensors(directory, type(model).__name__, config, parameters, weights)
    _fill(model, parameters, weights, sharding, progress)
    if (directory / GENERATION_CONFIG).exists():
        model.generation = generation
    return model


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


def _dtype_name(dtype: Any) -> str:
    try:
        name = jnp.dtype(dtype).name
    except TypeError:
        name = str(dtype)
    if name not in MODEL_DTYPES:
        raise ConfigError(f"dtype is {name!r}; allowed: auto, {', '.join(MODEL_DTYPES)}")
    return name


def _check_tensors(
    directory: Path,
    architecture: str,
    config: Any,
    parameters: list[Parameter],
    weights: Mapping[str, SafetensorsFile],
) -> None:
    """Every tensor must be there with the right shape and a usable dtype, and no others."""
    problems: list[str] = []
    wanted: set[str] = set()
    for parameter in parameters:
        for entry in parameter.entries:
            wanted.add(entry.name)
            if entry.name not in weights:
                problems.append(f"{entry.name} {list(entry.shape)} is missing")
                continue
            file = weights[entry.name]
            info, dtype = file.tensors[entry.name], parameter.value.dtype
            where = f"{entry.name} in {file.path.name} has"
            if info.shape != entry.shape:
                problems.append(f"{where} shape {list(info.shape)}, expected {list(entry.shape)}")
            elif info.dtype != dtype and not {info.dtype, dtype} <= _FLOATS:
                problems.append(f"{where} dtype {info.dtype}, expected {dtype}")
    for name, file in weights.items():
        tied = name == "lm_head.weight" and getattr(config, "tie_word_embeddings", False)
        if name not in wanted and not tied and "rotary_emb." not in name:
            problems.append(f"{name!r} in {file.path.name} is no tensor of this architecture")
    if problems:
        raise CheckpointError(f"{directory}: the tensors do not fit {architecture}: {listing(problems)}")


def _fill(
    model: Any,
    parameters: list[Parameter],
    weights: Mapping[str, SafetensorsFile],
    sharding: Sharding | None,
    progress: bool | None,
) -> None:
    total = sum(p.value.size * p.value.dtype.itemsize for p in parameters)
    shown = None if progress is None else not progress
    loaded: dict[ParameterPath, nnx.Variable[Any]] = {}
    previous = None
    with tqdm.tqdm(total=total, unit="B", unit_scale=True, desc="loading", disable=shown) as bar:
        for parameter in parameters:
            host = _assemble(parameter, weights)
            place = sharding(parameter.path, parameter.shape) if callable(sharding) else sharding
            value = jax.device_put(host, place)
            # Transfers are asynchronous and keep their host buffer; at most two may be alive.
            jax.block_until_ready(previous)
            previous = value
            loaded[parameter.path] = parameter.variable.replace(value)
            bar.update(host.nbytes)
    jax.block_until_ready(previous)
    nnx.update(model, nnx.from_flat_state(loaded.items()))


def _assemble(parameter: Parameter, weights: Mapping[str, SafetensorsFile]) -> np.ndarray:
    """The parameter in host memory, never a view of the file: device_put may alias what it is given."""
    out = np.empty(parameter.shape, parameter.value.dtype)
    for entry in parameter.entries:
        whole = len(parameter.entries) == 1
        target = out if whole else out[entry.start : entry.start + entry.shape[0]]
        file = weights[entry.name]
        try:
            with np.errstate(over="raise", invalid="ignore", under="ignore"):
                np.copyto(target, file.read(entry.name), casting="unsafe")
        except FloatingPointError as error:
            raise CheckpointError(
                f"{file.path}: tensor {entry.name} has values beyond the range of {out.dtype}"
            ) from error
    return out
