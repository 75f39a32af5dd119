"""Writes a model as a directory that Hugging Face's tools and ``load_model`` read."""

import contextlib
import dataclasses
import functools
import math
import os
import re
import shutil
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from hybridjax.checkpoints import ngram_tables, nvfp4, quantization_config
from hybridjax.checkpoints.directory import INDEX, SINGLE
from hybridjax.checkpoints.generation import FILE as GENERATION_CONFIG
from hybridjax.checkpoints.generation import GenerationDefaults
from hybridjax.checkpoints.parameters import Layout, Parameter, layout_of
from hybridjax.checkpoints.safetensors_file import write_safetensors
from hybridjax.errors import CheckpointError
from hybridjax.host_table import HostTable
from hybridjax.json_files import write_object
from hybridjax.models.base import TensorEntry

PROCESSOR_FILES = (  # that the weights' users read beside them: text, then images
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
)
_METADATA = {"format": "pt"}  # transformers refuses files without it


def save_pretrained(
    model: Any,
    directory: str | Path,
    *,
    max_shard_bytes: int = 5 * 2**30,
    tokenizer_dir: str | Path | None = None,
    extra_files: Mapping[str, bytes | str] | None = None,
) -> None:
    """Saves a model under the released tensor names and shapes.

    Writes config.json, generation_config.json and model.safetensors, or shards with an index. All is
    written to a temporary directory beside the target and renamed at the end, so a crash leaves either
    the old state or the new one. A checkpoint that is there already is replaced.

    A loaded model keeps what its JSON files said beyond what is read here, except ``auto_map``, which names
    code that would not be in the new directory, and ``quantization_config``: weights that were decoded on
    loading are written in the model's dtype. Weights that are in NVFP4 stay so, in the layout that
    ``model.nvfp4_layout`` names ("modelopt" or "compressed-tensors"; at first that of the files). N-gram
    tables on the host are written a few rows at a time.

    Args:
      model: a module of one of the registered architectures.
      directory: the directory to create or replace.
      max_shard_bytes: tensor bytes per file; a single larger tensor gets a file of its own.
      tokenizer_dir: where to copy the files of tokenizers and image processors from; None keeps those the
        target already has.
      extra_files: further files by name, for instance a model card. A checkpoint that has all of them
        is replaced with them.

    Raises:
      CheckpointError: the target holds files that are no part of a checkpoint, its parent directory
        cannot be written, or tokenizer_dir has no tokenizer.json.
    """
    extra_files = extra_files or {}
    target = resolved_target(directory)
    _check_replaceable(target, extra_files)
    tokenizer_files = _tokenizer_files(target, tokenizer_dir)
    layout = layout_of(model)
    tensors = _tensors(model, layout)
    with replacing(target) as staging:
        write_tensors(staging, tensors, max_shard_bytes)
        quantization, apart = _quantization(model, layout)
        write_object(staging / "config.json", _config_dict(model, layout, quantization))
        if apart is not None:
            write_object(staging / quantization_config.FILE, apart)
        write_object(staging / GENERATION_CONFIG, _generation_dict(model))
        for file in tokenizer_files:
            shutil.copyfile(file, staging / file.name)
        for name, content in extra_files.items():
            (staging / name).write_bytes(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """A new directory to be filled, which then takes the target's place; without, if filling it fails.

    Raises:
      CheckpointError: the target's parent directory cannot be written.
    """
    staging = _make_staging(target)
    try:
        yield staging
        for path in (*staging.iterdir(), staging):
            _flush(path)
        _swap(staging, target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _tokenizer_files(target: Path, tokenizer_dir: str | Path | None) -> list[Path]:
    source = target if tokenizer_dir is None else Path(tokenizer_dir)
    if tokenizer_dir is not None and not (source / "tokenizer.json").is_file():
        raise CheckpointError(f"{source}: has no tokenizer.json to copy")
    return [source / name for name in PROCESSOR_FILES if (source / name).is_file()]


def check_target(directory: str | Path, extra_names: Collection[str] = ()) -> None:
    """Fails now where ``save_pretrained`` would fail later; creates the parent directory.

    Args:
      directory: where a model is going to be saved.
      extra_names: names of the ``extra_files``.

    Raises:
      CheckpointError: the directory is not to be replaced, or its parent cannot be written.
    """
    target = resolved_target(directory)
    _check_replaceable(target, extra_names)
    _make_staging(target).rmdir()


def resolved_target(directory: str | Path) -> Path:
    """The absolute path of a target.

    Raises:
      CheckpointError: it cannot be one.
    """
    try:
        target = Path(directory).expanduser().resolve()
    except (RuntimeError, ValueError, OSError) as error:  # no such user, NUL characters, loops of links
        raise CheckpointError(f"{str(directory)!r} cannot be a directory: {error}") from error
    if not target.name:
        raise CheckpointError(f"{directory} cannot be replaced; give a directory below it")
    return target


def _make_staging(target: Path) -> Path:
    staging = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        staging.mkdir()
    except OSError as error:
        raise CheckpointError(f"{target}: cannot write beside it: {error}") from error
    return staging


def _check_replaceable(target: Path, extra_names: Collection[str]) -> None:
    """Refuses a target with files that are no checkpoint's.

    Extra files are taken for a checkpoint's where they are complete and beside a config: one of them
    alone may be anybody's.
    """
    known = {"config.json", GENERATION_CONFIG, quantization_config.FILE, SINGLE, INDEX, *PROCESSOR_FILES}
    for name in extra_names:
        if name in known or _is_shard(name) or not _is_plain(name):
            raise CheckpointError(f"{name!r} cannot be the name of an extra file")
    try:
        if not target.exists():
            return
        if not target.is_dir():
            raise CheckpointError(f"{target} is a file; give a directory")
        files = {file.name: file.is_dir() for file in target.iterdir()}
    except OSError as error:
        raise CheckpointError(f"{target}: cannot be read: {error}") from error
    if files.keys() >= {"config.json", *extra_names}:
        known |= set(extra_names)
    for name, is_directory in files.items():
        if is_directory or (name not in known and not _is_shard(name)):
            raise CheckpointError(
                f"{target} holds {name}, which is no part of a checkpoint and would be lost; "
                "give another directory"
            )


def _is_plain(name: str) -> bool:
    return name not in ("", "..") and Path(name).name == name


def _is_shard(name: str) -> bool:
    return name.startswith("model-") and name.endswith(".safetensors")


def remove_leftovers(target: Path) -> None:
    """Removes what runs that were killed while they replaced a target have left beside it."""
    left = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{8}}\.(tmp|old)")
    for path in target.parent.iterdir():
        if left.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


def _flush(path: Path) -> None:
    """Waits until a file or directory is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _swap(staging: Path, target: Path) -> None:
    """Puts ``staging`` where ``target`` is, which stays whole until then."""
    old = target.with_name(staging.name.removesuffix(".tmp") + ".old")
    if target.exists():
        os.rename(target, old)
    try:
        os.rename(staging, target)
    except OSError:
        if old.exists():
            os.rename(old, target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _config_dict(model: Any, layout: Layout, quantization: dict[str, Any] | None) -> dict[str, Any]:
    out = model.config.to_dict()
    name = "dtype" if "dtype" in out else "torch_dtype"
    dtypes: Counter[str] = Counter()
    for parameter in layout.parameters:
        if jnp.issubdtype(parameter.value.dtype, jnp.floating):
            dtypes[parameter.value.dtype.name] += parameter.value.nbytes
    if quantization is None:
        return without_quantization(out) | {name: dtypes.most_common(1)[0][0]}
    return without_quantization(out) | {
        name: jnp.dtype(model.dtype).name,
        "quantization_config": quantization,
    }


def _quantization(model: Any, layout: Layout) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """The quantization_config of config.json and the content of ``quantization_config.FILE``, if any."""
    names = {entry.name for parameter in layout.parameters for entry in parameter.entries}
    if not nvfp4.weights_in_nvfp4(model):
        return None, None
    return quantization_config.of_tensors(names, model.nvfp4_layout)


def without_quantization(config: dict[str, Any]) -> dict[str, Any]:
    """The fields that hold of decoded weights, here and in nested configurations."""
    return {
        name: without_quantization(value) if isinstance(value, dict) else value
        for name, value in config.items()
        if name not in ("quantization_config", "compression_config")
    }


def _generation_dict(model: Any) -> dict[str, Any]:
    generation = getattr(model, "generation", None)
    if generation is None:
        generation = GenerationDefaults(
            do_sample=True,
            eos_token_id=getattr(model.config, "eos_token_id", None),
            bos_token_id=getattr(model.config, "bos_token_id", None),
            pad_token_id=getattr(model.config, "pad_token_id", None),
        )
    return generation.to_dict()


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor to be written to a checkpoint; ``read`` gives it, whole or as consecutive rows."""

    dtype: np.dtype
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray | Iterator[np.ndarray]]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def _tensors(model: Any, layout: Layout) -> dict[str, StoredTensor]:
    """Everything to be written, by name."""
    # Constants first: they are what transformers writes first.
    constants: Mapping[str, np.ndarray] = getattr(model, "checkpoint_constants", dict)()
    out = {
        name: StoredTensor(value.dtype, value.shape, functools.partial(np.asarray, value))
        for name, value in constants.items()
    }
    read = _device_reader()
    for parameter in layout.parameters:
        dtype = np.dtype(parameter.value.dtype)
        for entry in parameter.entries:
            out[entry.name] = StoredTensor(dtype, entry.shape, functools.partial(read, parameter, entry))
    for entries, table in zip(layout.tables, _host_tables(model, layout)):
        for entry in entries:
            stop = entry.start + entry.shape[0]
            read_rows = functools.partial(ngram_tables.pieces, table, entry.start, stop)
            out[entry.name] = StoredTensor(table.dtype, entry.shape, read_rows)
    return out


def _host_tables(model: Any, layout: Layout) -> Sequence[HostTable]:
    tables = (getattr(model, "host_tables", None) or ()) if layout.tables else ()
    wanted = [(entries[-1].start + entries[-1].shape[0], entries[-1].shape[1]) for entries in layout.tables]
    found = [table.shape for table in tables]
    if found != wanted:
        raise CheckpointError(f"the model's host_tables have shapes {found}, but it needs {wanted}")
    return tables


def write_tensors(directory: Path, tensors: Mapping[str, StoredTensor], max_shard_bytes: int) -> None:
    """Writes model.safetensors, or shards with an index, tensor by tensor."""
    shards = list(_shards(tensors, max_shard_bytes))
    weight_map: dict[str, str] = {}
    for i, names in enumerate(shards):
        file = SINGLE if len(shards) == 1 else f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        layout = {name: (tensors[name].dtype, tensors[name].shape) for name in names}
        write_safetensors(directory / file, layout, lambda name: tensors[name].read(), _METADATA)
        weight_map |= dict.fromkeys(names, file)
    if len(shards) > 1:
        total = sum(tensor.nbytes for tensor in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        write_object(directory / INDEX, index)


def _shards(tensors: Mapping[str, StoredTensor], max_shard_bytes: int) -> Iterator[list[str]]:
    names: list[str] = []
    size = 0
    for name, tensor in tensors.items():
        if names and size + tensor.nbytes > max_shard_bytes:
            yield names
            names, size = [], 0
        names.append(name)
        size += tensor.nbytes
    yield names


def _device_reader() -> Callable[[Parameter, TensorEntry], np.ndarray]:
    """Reads tensors from the device, keeping one parameter in host memory for its other tensors."""
    kept: dict[Any, np.ndarray] = {}

    def read(parameter: Parameter, entry: TensorEntry) -> np.ndarray:
        if parameter.path not in kept:
            kept.clear()
            kept[parameter.path] = np.asarray(parameter.value)
        held = entry.part_of(kept[parameter.path])
        if entry.spread is None:
            return held
        number = 1 / held[:1] if entry.inverse else held[:1]
        return number.reshape(entry.shape)

    return read
